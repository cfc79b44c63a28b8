"""Attention for training: joint attention of Flux in which each example says who sees whom.

Two habits of serving are trained. In an isolated example unmasked tokens see unmasked tokens only, as they do when a
template is registered. In a reusing example the keys and values of unmasked tokens are those that another example of
the batch, the same picture at an earlier step, has just computed: that is how an edit reuses its own dense steps.
"""

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor


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
