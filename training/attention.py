"""Attention for training: joint attention of Flux in which each example says who sees whom.

Two habits of serving are trained. In an isolated example unmasked tokens see unmasked tokens only, as they do when a
template is registered. In a reusing example the keys and values of unmasked tokens are those that another example of
the batch, the same picture at an earlier step, has just computed: that is how an edit reuses its own dense steps.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CHOICES = {SDPBackend.EFFICIENT_ATTENTION: "efficient", SDPBackend.CUDNN_ATTENTION: "cuDNN"}
TOLERANCE = 0.02  # of outputs and gradients in bfloat16, relative to float32


class MaskedAttention:
    """A Flux attention processor that says who sees whom; text tokens come before image tokens.

    attention_mask [B, 1, L, L] says which tokens see which. The keys and values of tokens in reused [B, L] are those of
    the example that source [B] names.
    """

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        source: Tensor | None = None,
        reused: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = (_heads(attn, project(hidden_states)) for project in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text_q, text_k, text_v = (_heads(attn, project(encoder_hidden_states)) for project in added)
            q = torch.cat([attn.norm_added_q(text_q), q], 1)
            k = torch.cat([attn.norm_added_k(text_k), k], 1)
            v = torch.cat([text_v, v], 1)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1).to(v.dtype) for x in (q, k))
        if source is not None and reused is not None:
            k, v = (torch.where(reused[:, :, None, None], x.detach()[source], x) for x in (k, v))
        out = _attend(q, k, v, attention_mask).to(hidden_states.dtype)
        if encoder_hidden_states is None:
            return out
        text, image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)
        return attn.to_out[0](image), attn.to_add_out(text)


def _heads(attn: FluxAttention, x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, attn.head_dim))  # [B, L, heads, channels]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def choose_kernel(batch: int, length: int, heads: int, channels: int) -> str:
    """Let masked attention of a training step on a GPU use the quickest kernel that computes it right, forwards and
    backwards, from here on. Returns its name with the milliseconds of each.

    cuDNN's gradients are known to fail where all scores of a query are far below zero; normed heads keep them small.
    """
    shape = batch, length, heads, channels
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.rand(batch, 1, length, length, device="cuda") < 0.7
    mask |= torch.eye(length, device="cuda", dtype=torch.bool)  # no query sees nothing
    times = {}
    for backend in CHOICES:
        with sdpa_kernel(backend):
            try:
                if is_right(run := attention_step(inputs, mask), [x[:4] for x in inputs], mask[:4]):
                    times[backend] = milliseconds(run)
            except RuntimeError:  # this GPU or this build has no such kernel
                continue
    if not times:
        return "the default"
    best = min(times, key=lambda backend: times[backend])
    torch.backends.cuda.enable_mem_efficient_sdp(best is SDPBackend.EFFICIENT_ATTENTION)
    torch.backends.cuda.enable_cudnn_sdp(best is SDPBackend.CUDNN_ATTENTION)
    torch.compiler.config.cache_key_tag = CHOICES[best]  # graphs on disk may hold the other kernel
    return f"{CHOICES[best]} of " + ", ".join(f"{CHOICES[b]} {time:.2f} ms" for b, time in times.items())


def attention_step(inputs: list[Tensor], mask: Tensor) -> Callable[[], list[Tensor]]:
    """A function that attends and returns outputs and gradients."""

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = _attend(*leaves, mask)
        return [out, *torch.autograd.grad(out, leaves, inputs[0].flatten(2))]

    return run


def is_right(run: Callable[[], list[Tensor]], inputs: list[Tensor], mask: Tensor) -> bool:
    """True if the first examples' outputs and gradients are those of float32."""
    with sdpa_kernel(SDPBackend.MATH):
        expected = attention_step([x.float() for x in inputs], mask)()
    errors = [(a[: len(b)] - b).norm() / b.norm() for a, b in zip(run(), expected, strict=True)]
    return bool(torch.stack(errors).max() < TOLERANCE)


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats
