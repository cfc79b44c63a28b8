"""Attention over the packed tokens of a UNet's level. Knows layouts; knows no weights."""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from instgenie.cost.network import NUM_BUCKETS
from instgenie.models.unet.layout import LevelLayout

FLASH_DTYPES = (torch.float16, torch.bfloat16)
MIN_FLASH_CAPABILITY = (8, 0)
FLASH_MULTIPLE, MAX_FLASH_CHANNELS = 8, 256  # of the channels of one head
# cuDNN's attention clears a word of memory before every call. With few branches and few keys this costs more than cuDNN
# gains, and several times more while activations are being copied to the device. For each new shape it makes a plan,
# which takes longer than many steps: lists that are not padded have a new shape with every mask.
MAX_SMALL_BRANCHES, MAX_SMALL_KEYS = 4, 512
SMALL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(layout: LevelLayout, q: Tensor, k: Tensor, v: Tensor, key_bounds: Tensor | None) -> Tensor:
    """Attend from packed tokens [computed tokens, heads, head channels] to each branch's keys and values [branches,
    keys, heads, head channels]; `key_bounds` separate the branches' keys, where the layout has bounds. Padding is left
    uninitialised."""
    if layout.bounds is None:
        return attend_even(q.unflatten(0, (layout.num_branches, -1)), k, v).flatten(0, 1)
    if runs_flash(q):
        assert key_bounds is not None
        return attend_flash(q, k, v, layout.bounds, key_bounds, layout.num_all)
    if q.is_cuda:  # a captured pass cannot ask how long branches are; slower than the cost model assumes
        return attend_whole(layout, q, k, v)
    return attend_apart(q, k, v, layout.bounds)


def attend_even(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [branches, tokens, heads, head channels]
    with kernels_for(q, k):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def kernels_for(queries: Tensor, keys: Tensor) -> AbstractContextManager[object]:
    """The kernels that suit these tensors [branches, tokens, heads, head channels]."""
    is_small = suits_small(len(keys), keys.shape[1], queries.shape[1])
    return sdpa_kernel(SMALL) if keys.is_cuda and is_small else nullcontext()


def suits_small(num_branches: int, num_keys: int, num_queries: int) -> bool:
    is_padded = num_queries * NUM_BUCKETS % num_keys == 0
    return num_branches <= MAX_SMALL_BRANCHES and (num_keys <= MAX_SMALL_KEYS or not is_padded)


def attend_apart(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Attend one branch after the other."""
    attended = torch.zeros_like(q)
    for branch, (start, end) in enumerate(pairwise(bounds.tolist())):
        attended[start:end] = attend_even(q[None, start:end], k[branch, None], v[branch, None])[0]
    return attended


def attend_whole(layout: LevelLayout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from all tokens of every picture, and keep the results of the computed ones."""
    assert layout.origin is not None
    assert layout.index is not None
    return attend_even(q[layout.origin.clamp(min=0)], k, v).flatten(0, 1)[layout.index]


def attend_flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, max_queries: int) -> Tensor:
    """Attend in all branches in one launch; the bounds give the number of queries of each."""
    attended, *_ = torch.ops.aten._flash_attention_forward(
        q, k.flatten(0, 1), v.flatten(0, 1), bounds, key_bounds, max_queries, k.shape[1], 0.0, False, False
    )
    out: Tensor = attended
    return out


def runs_flash(q: Tensor) -> bool:
    channels = q.shape[-1]
    return (
        q.is_cuda
        and torch.backends.cuda.is_flash_attention_available()
        and q.dtype in FLASH_DTYPES
        and torch.cuda.get_device_capability(q.device) >= MIN_FLASH_CAPABILITY
        and channels % FLASH_MULTIPLE == 0
        and channels <= MAX_FLASH_CHANNELS
    )
