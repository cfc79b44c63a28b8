"""The ControlNets that edits may name, and the folders behind the names. Needs no torch.

A folder is one that diffusers saves: a config.json and weights in safetensors. It is compared with the model by its
config alone, so one that does not fit is refused before anything is loaded.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instgenie.adapters.registry import NAME
from instgenie.errors import ControlError, ControlNotFoundError
from instgenie.types import ControlUse

CONFIG = "config.json"
UNET_KIND, UNION_KIND, FLUX_KIND = "ControlNetModel", "ControlNetUnionModel", "FluxControlNetModel"
KINDS = (UNET_KIND, UNION_KIND, FLUX_KIND)
UNSUPPORTED: dict[str, tuple[object, ...]] = {  # fields of a config, and the values that are computed here
    "global_pool_conditions": (None, False),
    "class_embed_type": (None,),
    "conditioning_channels": (None, 3),
}


@dataclass(frozen=True)
class ControlShape:
    """What a ControlNet must have in common with the model, as plain numbers."""

    kinds: tuple[str, ...]  # diffusers' classes
    facts: dict[str, Any]  # fields of its config


NO_SHAPE = ControlShape((), {})  # of a model that takes no ControlNets


@dataclass(frozen=True)
class RegisteredControlNet:
    name: str
    path: Path
    config: Mapping[str, Any]
    version: str
    num_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def kind(self) -> str:
        return str(self.config["_class_name"])

    @property
    def reads_latents(self) -> bool:
        """True if it sees its image as the autoencoder encodes it."""
        return self.kind == FLUX_KIND and self.config.get("conditioning_embedding_channels") is None

    @property
    def num_modes(self) -> int | None:
        """Kinds of images that it knows; None: one."""
        modes: int | None = self.config.get("num_control_type" if self.kind == UNION_KIND else "num_mode")
        return modes

    @property
    def places(self) -> tuple[int, int]:
        if self.kind == FLUX_KIND:
            return int(self.config["num_layers"]), int(self.config["num_single_layers"])
        levels = len(self.config["block_out_channels"])
        return levels * (int(self.config["layers_per_block"]) + 1), 1

    def fits(self, shape: ControlShape) -> bool:
        try:
            self.check(shape)
        except ControlError:
            return False
        return True

    def check(self, shape: ControlShape) -> None:
        """Raise a ControlError unless it fits the model."""
        if shape == NO_SHAPE:
            raise ControlError(f"the ControlNet {self.name!r} does not fit: models of this family take none")
        if self.kind not in shape.kinds:
            needed = " or a ".join(shape.kinds)
            raise ControlError(f"the ControlNet {self.name!r} is a {self.kind}: this model needs a {needed}")
        for key, expected in shape.facts.items():
            found = plain(self.config[key]) if key in self.config else expected
            if found != plain(expected):
                raise ControlError(
                    f"the ControlNet {self.name!r} does not fit the model: its {key} is {found}, the model's is "
                    f"{plain(expected)}"
                )


class ControlNetRegistry:
    def __init__(self, modules: Mapping[str, str] | None = None) -> None:
        """Raises a ControlError if a folder holds no ControlNet."""
        self.shape: ControlShape | None = None  # of the model; None: not known yet, and nothing is compared
        self._known = {name: open_controlnet(check_name(name), Path(path)) for name, path in (modules or {}).items()}

    @property
    def is_empty(self) -> bool:
        return not self._known

    def open(self, name: str) -> None:
        """Let a path be a name, where no requests come from others."""
        self._known[name] = open_controlnet(name, Path(name))

    def has(self, name: str) -> bool:
        return name in self._known

    def list(self) -> list[RegisteredControlNet]:
        return sorted(self._known.values(), key=lambda one: one.name)

    def find(self, name: str) -> RegisteredControlNet:
        found = self._known.get(name)
        if found is None:
            known = f"{', '.join(map(repr, sorted(self._known)))} are known" if self._known else "none is known"
            raise ControlNotFoundError(f"the ControlNet {name[:128]!r} does not exist: {known}")
        if self.shape:
            found.check(self.shape)
        return found

    def resolve(self, uses: Sequence[ControlUse]) -> tuple[ControlUse, ...]:
        """The same uses with the folders behind their names. Raises a ControlError if they cannot work together."""
        found = [self.find(use.name) for use in uses]
        for one in found[1:]:
            if (one.places, one.reads_latents) != (found[0].places, found[0].reads_latents):
                raise ControlError(
                    f"the ControlNets {found[0].name!r} and {one.name!r} cannot guide one edit: they have "
                    f"{found[0].places} and {one.places} residuals"
                )
        return tuple(filled(use, one) for use, one in zip(uses, found, strict=True))


def filled(use: ControlUse, net: RegisteredControlNet) -> ControlUse:
    if net.num_modes is None and use.mode is not None:
        raise ControlError(f"the mode of the ControlNet {net.name!r} is {use.mode}: it knows one kind of image alone")
    if net.num_modes is not None and not 0 <= (use.mode if use.mode is not None else -1) < net.num_modes:
        raise ControlError(
            f"the mode of the ControlNet {net.name!r} is {use.mode}: a number from 0 to {net.num_modes - 1} is expected"
        )
    return use._replace(
        path=str(net.path),
        version=net.version,
        places=net.places,
        reads_latents=net.reads_latents,
        num_bytes=net.num_bytes,
    )


def open_controlnet(name: str, folder: Path) -> RegisteredControlNet:
    folder = folder.resolve()
    config = read_config(name, folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".ckpt", ".pt", ".pth"})
        found = ", ".join(others) or "no weights at all"
        raise ControlError(f"the ControlNet {name!r} has no weights in safetensors: {folder} holds {found}")
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    version = hashlib.sha256(json.dumps([str(folder), config, facts], sort_keys=True).encode()).hexdigest()
    return RegisteredControlNet(name, folder, config, version, sum(size for _, size, _ in facts))


def read_config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ControlError(
            f"the ControlNet {name!r} is no folder that diffusers saved: {folder} holds no {CONFIG}"
            if folder.is_dir()
            else f"the ControlNet {name!r} needs the folder {folder}: it does not exist"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError:
        config = None
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if not isinstance(config, dict) or kind not in KINDS:
        raise ControlError(f"the ControlNet {name!r} is a {kind}: one of {', '.join(KINDS)} is expected")
    for key, values in UNSUPPORTED.items():
        if config.get(key) not in values:
            raise ControlError(f"the ControlNet {name!r} has {key}={config[key]!r}: that is not supported")
    return config


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ControlError(
            f"the name {name!r} is not one for a ControlNet: up to 128 letters, digits, dots, dashes and underscores "
            "are expected, a letter or a digit first"
        )
    return name


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
