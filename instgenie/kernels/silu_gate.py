"""The gate of a feed-forward layer: the SiLU of the outputs of one layer times those of another."""

import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.quantize import Fp8Rows, Rows, empty_fp8, quantize_rows_reference, store_fp8
from instgenie.kernels.switch import num_warps, power_of_two, runs_fused, tl, triton

MAX_BLOCK = 1024  # channels of one program, unless it needs a whole row


def silu_gate(gate: Tensor, value: Tensor, fp8: bool = False) -> Rows:
    """[tokens, width] each, whose rows may be strided; with `fp8` as products of low precision read it"""
    if runs_fused(gate):
        return silu_gate_fused(gate, value, fp8)
    gated = silu_gate_reference(gate, value)
    return quantize_rows_reference(gated) if fp8 else gated


def silu_gate_reference(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def silu_gate_fused(gate: Tensor, value: Tensor, fp8: bool = False) -> Rows:
    num_tokens, width = gate.shape
    assert gate.stride(1) == value.stride(1) == 1
    out = empty_fp8((num_tokens, width), gate.device) if fp8 else gate.new_empty(num_tokens, width)
    values, scale = (out.values, out.scale) if isinstance(out, Fp8Rows) else (out, gate)
    block = power_of_two(width) if fp8 else min(power_of_two(width), MAX_BLOCK)
    if num_tokens:
        silu_gate_kernel[(num_tokens, -(-width // block))](
            gate, value, gate.stride(0), value.stride(0), values, scale,
            width=width, block=block, quantizes=fp8, num_warps=num_warps(block),
        )  # fmt: skip
    return out


@triton.jit()
def silu_gate_kernel(  # type: ignore[no-untyped-def]
    gate, value, gate_stride, value_stride, out, out_scale,
    width: tl.constexpr, block: tl.constexpr, quantizes: tl.constexpr,
):  # fmt: skip
    """One program per token and block of channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    gates = tl.load(gate + token * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(value + token * value_stride + channel, mask=inside, other=0.0).to(tl.float32)
    gated = gates * tl.sigmoid(gates) * values
    if quantizes:
        store_fp8(out, out_scale, token, channel, inside, gated, width)
    else:
        tl.store(out + token * width + channel, gated, mask=inside)
