"""Blocks over packed tokens: views of diffusers' own modules. They own no weights and no state, and read a module's
layers at every call, so layers may be exchanged at any time.

Linear layers and norms run over the tokens of all branches at once; only attention looks at one branch at a time.
Modulation is computed once per branch, or twice where references are clean, and read by that branch's tokens.

A cached block is the same block over fewer tokens: the layout says which, and attention reads keys of all tokens, each
at its own place. Keys of tokens that are not computed are written first, then those of tokens that are.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.cost.network import BlockShape
from instgenie.jobs.tokens import concat
from instgenie.kernels.heads import HeadPlaces, Heads, Projected, place
from instgenie.kernels.modulate import add_gated, add_norm_modulate
from instgenie.kernels.quantize import Rows
from instgenie.kernels.streams import beside
from instgenie.models.joint.flow import Apart, Flow
from instgenie.models.joint.layout import Layout
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.residual import Residual
from instgenie.models.layers.feed_forward import feed_forward, first_layer
from instgenie.models.layers.fp8_linear import reads_fp8
from instgenie.models.layers.linear import Owners, linear, linears


class EntryLayers(NamedTuple):
    """The layers by which rows enter an attention: a norm with shift and scale, projections, norms of the heads."""

    modulation: nn.Linear
    eps: float
    projections: Sequence[nn.Module]  # to Q, K and V; further ones read the same rows
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    first: int = 0  # which output of the modulation is the shift
    scale_first: bool = False  # the scale comes before the shift


class ExitLayers(NamedTuple):
    """The layers by which attended rows leave a block."""

    projection: nn.Module
    eps: float  # of the norm before the feed-forward layer
    feed_forward: nn.Module


class JointBlock(ABC):
    """A block in which tokens of text and image attend to each other."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def attn(self) -> Any:
        return self.module.attn

    @property
    @abstractmethod
    def head_shape(self) -> tuple[int, int]:
        """Heads of one attention, and channels of a head."""

    @property
    def num_attentions(self) -> int:
        """How many attentions the image tokens have keys for. They lie side by side in a row of K or V."""
        return 1

    @property
    @abstractmethod
    def modulations(self) -> Sequence[nn.Linear]:
        """The modulation layers of all entries, each once. A step asks for those of every block."""

    @abstractmethod
    def entries(self, is_text: bool) -> Sequence[EntryLayers]:
        """One entry per attention for which tokens of text, or of the image, have keys."""

    @abstractmethod
    def __call__(self, flow: Flow, mod: Modulation, layout: Layout, heads: Heads) -> Flow:
        """Run the block. The heads have the keys of tokens that are not computed."""

    @abstractmethod
    def describe(self) -> BlockShape: ...

    @property
    def joinable(self) -> Sequence[Sequence[nn.Module]]:
        """Groups of layers that read the same rows."""
        return [entry.projections for is_text in (True, False) for entry in self.entries(is_text)]

    def reserve(self, layout: Layout, like: Tensor) -> Heads:
        num_heads, head_channels = self.head_shape
        q = like.new_empty(sum(layout.num_joint), self.num_attentions * num_heads, head_channels)
        return Heads(q, self.reserve_keys(sum(layout.num_keys), like))

    def reserve_keys(self, num_keys: int, like: Tensor) -> Tensor:
        num_heads, head_channels = self.head_shape
        return like.new_empty(2, num_keys, self.num_attentions * num_heads, head_channels)

    def heads_of(self, heads: Heads, attention: int) -> Heads:
        """The heads of one attention."""
        if self.num_attentions == 1:
            return heads
        num_heads, _ = self.head_shape
        own = slice(attention * num_heads, (attention + 1) * num_heads)
        return Heads(None if heads.q is None else heads.q[:, own], heads.keys[:, :, own])

    def project_keys(
        self,
        rows: Tensor,
        mod: Modulation,
        rotary: Tensor,
        owners: Owners | None,
        keys: Tensor,
        places: HeadPlaces | None = None,
        is_text: bool = False,
    ) -> None:
        """Write K and V [2, tokens, heads, head channels] of rows that go into the block. A template's own rows have no
        owners, unless an edit's LoRAs project them."""
        for number, entry in enumerate(self.entries(is_text)):
            _, *layers = entry.projections[:3]
            rows_in, _ = modulated(
                entry, Residual(rows), mod, owners.modulated_by if owners else None, reads_fp8(layers[0])
            )
            k, v = linears(layers, rows_in, owners)
            heads = self.heads_of(Heads(None, keys), number)
            place(Projected(None, k, v, entry.norm_q, entry.norm_k), rotary, places, heads)


class DoubleBlock(JointBlock):
    """A block with layers of their own for text and for image, which meet in attention.

    The tokens of the image may also attend among themselves in a second attention. The text may end with the block: it
    then has keys and no way out.
    """

    @abstractmethod
    def exit(self, is_text: bool) -> ExitLayers | None:
        """None if the tokens end with this block."""

    @property
    def second_out(self) -> nn.Module | None:
        """The output projection of the second attention."""
        return None

    def __call__(self, flow: Flow, mod: Modulation, layout: Layout, heads: Heads) -> Flow:
        """The few tokens of the text read as many weights as those of the image, so both run beside each other."""
        assert isinstance(flow, Apart)
        text, image = flow.text, flow.image
        text_owners, image_owners = layout.text_owners, layout.image_owners
        [text_entry], [image_entry, *seconds] = self.entries(is_text=True), self.entries(is_text=False)
        text_exit, image_exit, second_out = self.exit(is_text=True), self.exit(is_text=False), self.second_out
        first, second = self.heads_of(heads, 0), self.heads_of(heads, 1) if seconds else None
        assert image_exit is not None

        def enter_text() -> Sequence[Tensor]:
            if second:  # in which the text has no keys; kept rows have numbers there nevertheless
                second.keys.index_fill_(1, layout.text_places.keys, 0)
            return enter(text_entry, text, mod, text_owners, layout, layout.text_places, first)

        def enter_image() -> Sequence[Tensor]:
            columns = enter(image_entry, image, mod, image_owners, layout, layout.image_places, first)
            if second:
                enter(seconds[0], image, mod, image_owners, layout, layout.image_places, second)
            return columns

        def leave_text() -> Residual:
            if text_exit is None:
                return text
            return leave(
                text_exit, text.total, linear(text_exit.projection, text_out, text_owners), text_mod, text_owners
            )

        def leave_image() -> Residual:
            rows, out = image.total, linear(image_exit.projection, image_out, image_owners)
            gate, *feeding = image_mod
            if second and second_out:
                rows = add_gated(rows, gate, out, image_owners.modulated_by)
                gate, out = feeding[5], linear(second_out, attend_images(second, layout), image_owners)
            return leave(image_exit, rows, out, (gate, *feeding[:3]), image_owners)

        text_mod, image_mod = beside(enter_text, enter_image, heads.keys)
        text_out, image_out = layout.part(attend(first, layout))
        text, image = beside(leave_text, leave_image, heads.keys)
        return Apart(text, image)


def enter(
    entry: EntryLayers,
    rows: Residual,
    mod: Modulation,
    owners: Owners,
    layout: Layout,
    places: HeadPlaces,
    heads: Heads,
) -> Sequence[Tensor]:
    """Write Q, K and V of rows; return the columns that modulate the rest of the block."""
    rows_in, columns = modulated(entry, rows, mod, owners.modulated_by, reads_fp8(entry.projections[0]))
    q, k, v = linears(entry.projections, rows_in, owners)
    place(Projected(q, k, v, entry.norm_q, entry.norm_k), layout.rotary, places, heads)
    return columns


def leave(way: ExitLayers, rows: Tensor, attended: Tensor, mod: Sequence[Tensor], owners: Owners) -> Residual:
    """Add what was attended, and feed the sum forward."""
    gate_attended, shift, scale, gate = mod
    fp8 = reads_fp8(first_layer(way.feed_forward))
    index = owners.modulated_by
    total, inner = add_norm_modulate(rows, gate_attended, attended, shift, scale, index, way.eps, fp8)
    return Residual(total, gate, feed_forward(way.feed_forward, inner, owners), index)


def modulated(
    entry: EntryLayers, x: Residual, mod: Modulation, rows: Tensor | None, fp8: bool = False
) -> tuple[Rows, Sequence[Tensor]]:
    """Return the input of an attention, and the columns [branches, width] after its own that modulate the rest of the
    block. Rows give the branch of each token; rows that a branch has kept have none, and a single time."""
    shift, scale, *others = mod.of(entry.modulation)[entry.first :]
    if entry.scale_first:
        shift, scale = scale, shift
    return x.normed(shift, scale, rows, entry.eps, fp8), others


def attend(heads: Heads, layout: Layout) -> list[Tensor]:
    """Return the attended tokens per branch [joint tokens, width]."""
    return [attend_one(*part) for part in by_branch(heads, layout)]


def attend_images(heads: Heads, layout: Layout) -> Tensor:  # [image tokens, width]
    """Attend from the image tokens of each branch to its image tokens alone."""
    return concat(attend_behind(heads, layout, layout.num_text, layout.num_all_text))


def attend_behind(
    heads: Heads, layout: Layout, num_queries: Sequence[int], num_keys: Sequence[int]
) -> list[Tensor]:  # per branch [joint tokens behind the first ones, width]
    """Attend among the tokens of each branch but its first ones, so many queries and keys."""
    parts = zip(by_branch(heads, layout), num_queries, num_keys, strict=True)
    return [attend_one(q[num:], k[num_all:], v[num_all:]) for (q, k, v), num, num_all in parts]


def by_branch(heads: Heads, layout: Layout) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    assert heads.q is not None
    k, v = heads.keys
    return zip(heads.q.split(layout.num_joint), k.split(layout.num_keys), v.split(layout.num_keys), strict=True)


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [tokens, heads, head channels] -> [tokens, width]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
