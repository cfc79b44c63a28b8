"""What makes a model the model it is: one digest over weights, configs and tokenizers. Knows no name and no folder.

Every weight counts, and none leaves its device: bytes are read as whole numbers and added up along rows and columns, at
the speed of memory, and the sums alone are hashed. Whole numbers add up to the same in any order, so the digest is the
same on every device. It tells checkpoints apart, whatever was trained, merged or rounded; it does not withstand a
forger.

Of a part without weights the shape alone counts. A process that has only some of the weights says so much of what the
model is; processes that together have all of them, together say which model it is. So it is always what was loaded that
counts, not what lies under the same name by now.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

WORD = torch.int64
ROW = 1024  # words
VERSION = "transformers_version"  # of the library that wrote a config; says nothing about the model


def identify(parts: Mapping[str, Any]) -> str:
    """Parts of a model by name: modules, tokenizers, plain values."""
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
        return f"{part('').input_ids} {part.pad_token_id} {part.padding_side} {part.model_max_length}"
    config = getattr(part, "config", None)
    if config is None:
        return repr(part)
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    known = {name: value for name, value in values.items() if not name.startswith("_") and name != VERSION}
    return json.dumps(known, sort_keys=True, default=str)


def add_up(tensor: Tensor) -> Iterator[Tensor]:
    """A change of any word changes its row's sum; words that change places change their columns'. Few bytes are left
    over, and are taken as they are."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if flat.storage_offset() % WORD.itemsize:
        flat = flat.clone()
    num_even = len(flat) - len(flat) % (ROW * WORD.itemsize)
    words = flat[:num_even].view(WORD).view(-1, ROW)
    yield from (words.sum(0), words.sum(1), flat[num_even:])
