"""Modules without weights, and where their weights are: a part of a pipeline before it is filled.

No weight is drawn at random and none is read here. The libraries themselves say which tensor of a file belongs to which
parameter, since they rename and tie tensors of old and new checkpoints: diffusers has a function for that, and
transformers loads tensors whose one value stands at every place, so that they take no memory. The place of that value
in memory tells them apart. What does not fit is a ValueError, as theirs are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import Tensor, nn

from instgenie.models.family import Family
from instgenie.models.loading.folder import read_index, stored_tensors
from instgenie.models.loading.stored import StoredTensor

LIBRARIES = {"diffusers": diffusers, "transformers": transformers}


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A module whose parameters have no weights yet."""

    module: nn.Module
    sources: Mapping[str, StoredTensor]  # by the name of the parameter or buffer that they belong to


def make_skeleton(folder: Path, part: str, dtype: torch.dtype) -> Skeleton:
    library, cls = find_class(folder, part)
    stored = stored_tensors(folder / part)
    if "quantization_config" in json.loads((folder / part / "config.json").read_text()):
        raise ValueError(f"the weights in {folder / part} are quantised by another library: plain weights are expected")
    make = diffusers_skeleton if library == "diffusers" else transformers_skeleton
    found = make(cls, folder / part, stored, dtype)
    for name, source in found.sources.items():
        shape = tuple(tensor_named(found.module, name).shape)
        if shape != source.shape:
            raise ValueError(f"{name} in {folder / part} has the shape {list(source.shape)}: {list(shape)} is expected")
    return found


def find_class(folder: Path, part: str) -> tuple[str, Any]:
    library, kind = read_index(folder)[part]
    return library, getattr(LIBRARIES[library], kind)


def diffusers_skeleton(cls: Any, part: Path, stored: dict[str, StoredTensor], dtype: torch.dtype) -> Skeleton:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of tables that no file has
    try:
        with init_empty_weights():
            module = cls.from_config(cls.load_config(part))
    finally:
        torch.set_default_dtype(before)
    module.register_to_config(_name_or_path=str(part))
    module._fix_state_dict_keys_on_load(stored)
    names = module.state_dict().keys()
    if missing := [name for name, _ in module.named_parameters() if name not in stored]:
        raise ValueError(f"the weights in {part} lack {missing[0]!r}")
    return Skeleton(module, {name: source for name, source in stored.items() if name in names})


def transformers_skeleton(cls: Any, part: Path, stored: dict[str, StoredTensor], dtype: torch.dtype) -> Skeleton:
    marks = {name: torch.zeros((), dtype=kept_dtype(source, dtype)) for name, source in stored.items()}
    module, told = cls.from_pretrained(
        None,
        config=cls.config_class.from_pretrained(part),
        state_dict={name: mark.expand(stored[name].shape) for name, mark in marks.items()},
        dtype=dtype,
        output_loading_info=True,
    )
    names = {mark.data_ptr(): name for name, mark in marks.items()}
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    sources = {name: stored[names[one.data_ptr()]] for name, one in tensors.items() if one.data_ptr() in names}
    absent = [name for name, _ in module.named_parameters() if name not in sources]
    if absent:
        is_missing = absent[0] in told["missing_keys"]
        reason = f"lack {absent[0]!r}" if is_missing else f"hold {absent[0]!r} in another form"
        raise ValueError(f"the weights in {part} {reason}")
    return Skeleton(module, sources)


def make_hollow(folder: Path, part: str, dtype: torch.dtype, family: Family) -> Skeleton:
    """A part that gets no weights. Of a network the layers that embed prompts get theirs."""
    library, cls = find_class(folder, part)
    with torch.device("meta"):
        module: nn.Module = (
            cls.from_config(cls.load_config(folder / part))
            if library == "diffusers"
            else cls(cls.config_class.from_pretrained(folder / part))
        )
    module.to(dtype)
    names = [name for name in module.state_dict() if part == family.network_name and family.is_of_prompts(name)]
    stored = stored_tensors(folder / part) if names else {}
    if missing := [name for name in names if name not in stored]:
        raise ValueError(f"the weights in {folder / part} lack {missing[0]!r}")
    return Skeleton(module, {name: stored[name] for name in names})


class Rooms:
    """Memory on a device for tensors without weights. Tensors of layers that are joined share memory there, too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._shared: dict[int, Tensor] = {}  # flat, by the storage of the tensors without weights

    def make(self, hollow: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a tensor, in another dtype if one is given."""
        dtype = dtype or hollow.dtype
        storage = hollow.untyped_storage()
        if not hollow.is_meta or storage.nbytes() == hollow.nbytes:
            return torch.empty(hollow.shape, dtype=dtype, device=self.device)
        if storage._cdata not in self._shared:
            num_values = storage.nbytes() // hollow.itemsize
            self._shared[storage._cdata] = torch.empty(num_values, dtype=dtype, device=self.device)
        room = self._shared[storage._cdata]
        return room.as_strided(hollow.shape, hollow.stride(), hollow.storage_offset())


def kept_dtype(source: StoredTensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor on the device: whole numbers stay what they are."""
    return dtype if source.dtype.is_floating_point else source.dtype


def tensor_named(module: nn.Module, name: str) -> Tensor:
    owner, _, own = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(owner), own)
    return found
