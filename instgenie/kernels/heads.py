"""Heads: normalises queries and keys, rotates them by their positions, and places them and the values where attention
reads them.

Queries are in the order of the tokens in the batch. Keys and values of a branch are contiguous, so there is room among
those of the tokens that flow through a block for those of the tokens that do not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton


@dataclass(frozen=True, eq=False)
class HeadPlaces:
    """The destination of each token."""

    joint: Tensor  # [tokens], its row among the queries and in the rotary table
    keys: Tensor  # [tokens], its row among keys and values


@dataclass(frozen=True, eq=False)
class Heads:
    """The inputs of attention, written piece by piece."""

    q: Tensor | None  # [joint tokens, heads, head channels]
    keys: Tensor  # K and V [2, keys, heads, head channels]


@dataclass(frozen=True, eq=False)
class Projected:
    """Outputs of the projections [tokens, width], whose rows may be strided, and the norms of their heads."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    norm_q: nn.Module | None  # RMS norms; None: heads are not normalised
    norm_k: nn.Module | None


def place(tokens: Projected, rotary: Tensor, places: HeadPlaces | None, heads: Heads) -> None:
    """Write tokens into heads, whose rows may be strided. The rotary table is complex [joint tokens, head channels /
    2], and one without channels rotates nothing. Without places, each token keeps its index."""
    run = place_fused if runs_fused(tokens.k) else place_reference
    run(tokens, rotary, places, heads)


def place_reference(tokens: Projected, rotary: Tensor, places: HeadPlaces | None, heads: Heads) -> None:
    head_channels = heads.keys.shape[3]
    k_out, v_out = heads.keys
    turns = rotary if places is None else rotary[places.joint]
    if tokens.q is not None and heads.q is not None:
        q = tokens.q.unflatten(1, (-1, head_channels))
        q = q if tokens.norm_q is None else tokens.norm_q(q)
        put(rotate(q, turns), heads.q, places.joint if places else None)
    k = tokens.k.unflatten(1, (-1, head_channels))
    k = k if tokens.norm_k is None else tokens.norm_k(k)
    put(rotate(k, turns), k_out, places.keys if places else None)
    put(tokens.v.unflatten(1, (-1, head_channels)), v_out, places.keys if places else None)


def put(x: Tensor, out: Tensor, places: Tensor | None) -> None:
    if places is None:
        out.copy_(x)
    else:
        out.index_copy_(0, places, x)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs of neighbouring channels, as real and imaginary parts, by each token's angles."""
    if not rotary.shape[1]:
        return x
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotary[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def place_fused(tokens: Projected, rotary: Tensor, places: HeadPlaces | None, heads: Heads) -> None:
    _, _, num_heads, head_channels = heads.keys.shape
    k_out, v_out = heads.keys
    num_tokens = len(tokens.k)
    q, q_out = (tokens.q, heads.q) if tokens.q is not None and heads.q is not None else (tokens.k, k_out)
    joint, keys = (places.joint, places.keys) if places else (q, q)
    norm_q, norm_k = tokens.norm_q, tokens.norm_k
    assert (norm_q is None) == (norm_k is None)
    assert all(x.stride()[1:] == (head_channels, 1) for x in (q_out, k_out, v_out))
    assert k_out.stride() == v_out.stride()
    assert rotary.is_contiguous()
    assert all(x.stride(1) == 1 for x in (q, tokens.k, tokens.v))
    if num_tokens:
        place_kernel[(num_tokens,)](
            q, tokens.k, tokens.v, q.stride(0), tokens.k.stride(0), tokens.v.stride(0), q_out, k_out, v_out,
            q_out.stride(0), k_out.stride(0), q if norm_q is None else norm_q.weight,
            q if norm_k is None else norm_k.weight, torch.view_as_real(rotary) if rotary.shape[1] else q, joint, keys,
            0.0 if norm_q is None else norm_q.eps, 0.0 if norm_k is None else norm_k.eps,
            num_heads=num_heads, head_channels=head_channels, block_heads=power_of_two(num_heads),
            block_channels=power_of_two(head_channels), has_q=tokens.q is not None, has_places=places is not None,
            norms=norm_q is not None, turns=rotary.shape[1] > 0, num_warps=8,
        )  # fmt: skip


@triton.jit()
def place_kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_stride, k_stride, v_stride, q_out, k_out, v_out, q_out_stride, key_stride, q_weight, k_weight, rotary,
    joint, keys, q_eps, k_eps,
    num_heads: tl.constexpr, head_channels: tl.constexpr, block_heads: tl.constexpr, block_channels: tl.constexpr,
    has_q: tl.constexpr, has_places: tl.constexpr, norms: tl.constexpr, turns: tl.constexpr,
):  # fmt: skip
    """One program per token, for all its heads."""
    token = tl.program_id(0).to(tl.int64)
    place, key_place = token, token
    if has_places:
        place, key_place = tl.load(joint + token), tl.load(keys + token)
    head = tl.arange(0, block_heads)[:, None]
    channel = tl.arange(0, block_channels)[None, :]
    inside = (head < num_heads) & (channel < head_channels)
    within = head * head_channels + channel
    in_head = channel < head_channels
    if turns:
        angles = tl.load(rotary + place * head_channels + channel, mask=in_head, other=0.0)
    if has_q:
        value = tl.load(q + token * q_stride + within, mask=inside, other=0.0).to(tl.float32)
        if norms:
            weight = tl.load(q_weight + channel, mask=in_head, other=0.0).to(tl.float32)
            value = norm(value, head_channels, q_eps) * weight
        if turns:
            value = turn(value, angles)
        tl.store(q_out + place * q_out_stride + within, value, mask=inside)
    value = tl.load(k + token * k_stride + within, mask=inside, other=0.0).to(tl.float32)
    if norms:
        weight = tl.load(k_weight + channel, mask=in_head, other=0.0).to(tl.float32)
        value = norm(value, head_channels, k_eps) * weight
    if turns:
        value = turn(value, angles)
    tl.store(k_out + key_place * key_stride + within, value, mask=inside)
    value = tl.load(v + token * v_stride + within, mask=inside, other=0.0)
    tl.store(v_out + key_place * key_stride + within, value, mask=inside)


@triton.jit()
def norm(value, num_channels: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    return value * tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / num_channels + eps)


@triton.jit()
def turn(value, angles):  # type: ignore[no-untyped-def]
    """Real and imaginary parts are neighbours, and so are cosines and sines."""
    real, imaginary = tl.split(tl.reshape(value, (value.shape[0], value.shape[1] // 2, 2)))
    cos, sin = tl.split(tl.reshape(angles, (1, value.shape[1] // 2, 2)))
    return tl.reshape(tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos), value.shape)
