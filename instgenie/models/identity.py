"""The identity of a model: one digest of its weights, configs and tokenizers, and the version of the code that computes
with them. Knows no name and no folder.

Every weight counts, and none leaves its device: the bytes are read as integers and summed along rows and columns at the
speed of memory, and only the sums are hashed. Integers have the same sum in any order, so the digest is the same on
every device. It distinguishes checkpoints that were trained, merged or rounded differently; it does not withstand
deliberate forgery.

Only the shape counts of a part without weights. So the digest of a process covers the weights that it has loaded, and
the digests of processes that together have all weights identify the model. A digest describes loaded weights, not the
files that have the same name now.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

NUMBERS_VERSION = 3  # of the code that makes activations; raise it with every change that makes them other numbers
LIBRARIES = ("diffusers", "transformers")  # that make them, too

WORD = torch.int64
ROW = 1024  # words
VERSION = "transformers_version"  # the library that wrote a config; not a property of the model


@lru_cache
def code_version() -> str:
    """The version of the code that makes activations, a part of their keys. Activations that another version has made
    are not found."""
    releases = [f"{name} {'.'.join(version(name).split('.')[:2])}" for name in LIBRARIES]
    return ", ".join([str(NUMBERS_VERSION), *releases])


def identify(parts: Mapping[str, Any]) -> str:
    """Digest the parts of a model, given by name: modules, tokenizers, plain values."""
    hashed = hashlib.sha256()
    for name, part in sorted(parts.items()):
        hashed.update(f"{name} {describe(part)}\n".encode())
        if isinstance(part, nn.Module):
            for path, tensor in part.state_dict().items():
                hashed.update(f"{path} {tensor.dtype} {list(tensor.shape)}\n".encode())
                for sums in () if tensor.is_meta else add_up(tensor):
                    hashed.update(sums.cpu().numpy().tobytes())
    return hashed.hexdigest()


def describe(part: Any) -> str:
    if isinstance(part, PreTrainedTokenizerBase):
        facts = f"{part('').input_ids} {part.pad_token_id} {part.padding_side} {part.model_max_length}"
        return f"{facts} {part.chat_template}" if part.chat_template else facts
    config = getattr(part, "config", None)
    if config is None:
        return repr(part)
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    known = {name: value for name, value in values.items() if not name.startswith("_") and name != VERSION}
    return json.dumps(known, sort_keys=True, default=str)


def add_up(tensor: Tensor) -> Iterator[Tensor]:
    """Sums along columns and rows, and the few bytes left over. Any changed word changes the sum of its row; swapped
    words change the sums of their columns."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if flat.storage_offset() % WORD.itemsize:
        flat = flat.clone()
    num_even = len(flat) - len(flat) % (ROW * WORD.itemsize)
    words = flat[:num_even].view(WORD).view(-1, ROW)
    yield from (words.sum(0), words.sum(1), flat[num_even:])
