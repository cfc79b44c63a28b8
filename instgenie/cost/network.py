"""The work of a step: FLOPs and bytes of every block, from numbers of tokens. Knows shapes; knows no time.

A model describes its network once, as plain numbers, so that a step can be priced without torch and without the model.
All tokens of a job flow through a dense block, only the masked ones through a cached block; in both, attention has keys
for all tokens.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from instgenie.types import NUM_PARTS, CacheDtype, Kind

NUM_BUCKETS = 32  # lists of masked tokens are padded to a multiple of 1/32 of all tokens
FLOAT_BYTES = 4  # per number of a tile
NUM_TEXT_BUCKETS = 16  # the tokens of a prompt are padded to 1/16 of the text, 1/8, 1/4, 1/2 or all of it
VALUE_BYTES: dict[CacheDtype, float] = {  # per value of packed rows; four bits, and two numbers of two bytes for 32
    "fp8": 1.0,
    "int4": 0.625,
}
# what is kept for a convolution or a norm has a row per token at the border of a tile, per token, or per tile (float32)
KeptRows = Literal["border", "all", "tiles"]
# the multiples to which the lists of a whole batch are padded
SHARES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)


@dataclass(frozen=True)
class BlockShape:
    """FLOPs of one block for one branch (a matrix product of m x k by k x n counts 2mkn), and what it caches."""

    per_token: int  # per image token that flows
    per_text: int  # per text token
    per_rest: int  # per unmasked token whose K and V are projected from its Y
    per_pair: int  # per query and key
    per_branch: int
    width: int  # of a row of K, V or Y
    output_width: int = 0  # of the output rows that a UNet's transformer also caches after its last block
    side: int = 1  # a token of this level covers side x side tokens of the finest level
    joint: bool = False  # text flows with the image, and the branches of a job share one copy of the activations
    sees_text: bool = True  # attention has keys for the text
    num_attentions: int = 1  # for which image tokens have K and V; in those after the first they attend to each other

    def row_width(self, kind: Kind) -> int:
        """The width of a row of Y, or of one of K or V."""
        return self.width * self.num_attentions if kind == "kv" else self.width


@dataclass(frozen=True)
class ConvolutionShape:
    """What is kept for a convolution that computes masked tiles alone: its input or, for the norm before it, numbers of
    each tile."""

    width: int  # of a row
    side: int  # as that of a block
    tile: int  # side of the tiles
    rows: KeptRows

    def num_rows(self, grid: tuple[int, int]) -> int:
        """The number of rows of a picture with so many rows and columns of tokens at the finest level; at least one, so
        that every place has rows."""
        down, across = (length // self.side for length in grid)
        if self.rows == "tiles":
            return -(-down // self.tile) * -(-across // self.tile)
        inside = (down - num_at_border(down, self.tile)) * (across - num_at_border(across, self.tile))
        return max(down * across - inside, 1) if self.rows == "border" else down * across


@lru_cache(maxsize=256)
def num_at_border(length: int, tile: int) -> int:
    """How many of the rows (or columns) of a picture lie between two tiles, on either side."""
    return sum(is_at_border(number, length, tile) for number in range(length))


def is_at_border(number: int, length: int, tile: int) -> bool:
    """Return whether a row (or column) of a picture is the first or the last of a tile, with another tile beside it."""
    return (number % tile == 0 and number > 0) or (number % tile == tile - 1 and number < length - 1)


@dataclass(frozen=True)
class NetworkShape:
    """A network as plain numbers."""

    blocks: tuple[BlockShape, ...]
    run_lengths: tuple[int, ...]  # blocks per run; tokens dropped in a run stay dropped to its end
    per_token: int  # FLOPs outside the blocks per image token and branch, masked or not
    per_branch: int  # FLOPs outside the blocks per branch
    pads_lists: bool = False  # the lists of masked tokens of a batch are padded together; see `common_share`
    dense_apart: bool = False  # dense jobs run in a pass of their own, apart from those that read activations
    convolutions: tuple[ConvolutionShape, ...] = ()  # that compute masked tiles alone; none: all of them are dense

    @property
    def sides(self) -> set[int]:
        """The sides of the levels: how many tokens of the picture a token of theirs stands for, along each axis."""
        return {block.side for block in self.blocks}

    @property
    def tiles(self) -> set[tuple[int, int]]:
        """The sides of the levels that are cut into tiles, each with that of its tiles."""
        return {(shape.side, shape.tile) for shape in self.convolutions}


@dataclass(frozen=True)
class Demand:
    """One job of a step, as plain numbers: the demand it makes on a network."""

    num_tokens: int
    num_masked: dict[int, int]  # by the side of each level: its masked tokens
    num_text: int
    num_branches: int = 1
    kind: Kind | None = None  # of its template's activations; None if it has none: every block is dense
    num_kept: int = 1  # branches that the activations keep
    value_bytes: float = 2  # per value in the activations
    num_served: float = 1  # steps that read what one of them loads
    num_prompt: int = 0  # text tokens that cached blocks compute, if they read those of the padding; 0: all
    in_gpu: frozenset[int] = frozenset()  # blocks whose rows of this step need no load
    loads_masked: bool = False  # the rows of masked tokens are loaded, too
    active: float | None = None  # share of the tiles that convolutions compute if every block is cached; None: all

    def num_flowing(self, shape: BlockShape, cached: bool) -> int:
        """Tokens that flow through a block."""
        return self.num_masked[shape.side] if cached and self.kind else self.num_tokens // shape.side**2

    def num_flowing_text(self, cached: bool) -> int:
        """Text tokens that a block computes."""
        return self.num_text - self.num_padding if cached else self.num_text

    @property
    def num_padding(self) -> int:
        """Text tokens whose rows cached blocks read."""
        return self.num_text - self.num_prompt if self.kind and self.num_prompt else 0

    def num_rest(self, shape: BlockShape) -> int:
        """Tokens that are not masked."""
        return self.num_tokens // shape.side**2 - self.num_masked[shape.side]


def count_passes(network: NetworkShape, demands: Sequence[Demand]) -> int:
    """Passes through the network that one step of these jobs takes."""
    return len({demand.kind is None for demand in demands}) if network.dense_apart else 1


def common_share(counts: Iterable[tuple[int, int]]) -> int | None:
    """The share of all tokens, in 1/NUM_BUCKETS, to which the lists of a batch are padded at every level. `counts` are
    (masked tokens, all tokens) of the batch per level. The share is one of a few, so that few captured shapes serve all
    batches. None if a level has no masked token to pad with."""
    pairs = list(counts)
    if not pairs or not all(count for count, _ in pairs):
        return None
    needed = max(-(-count * NUM_BUCKETS // num_all) for count, num_all in pairs)
    return min(share for share in SHARES if share >= needed)


def padded_count(share: int, num_all: int) -> int:
    return num_all * share // NUM_BUCKETS


def pad_demands(demands: Sequence[Demand]) -> list[Demand]:
    """The demands with padding counted as masked tokens, for a network that pads lists; jobs of one size are padded
    together. Padding is counted as if it attended, too."""
    sizes = {demand.num_tokens for demand in demands if demand.kind}
    shares = {size: padding_shares([one for one in demands if one.kind and one.num_tokens == size]) for size in sizes}
    return [pad_demand(demand, shares[demand.num_tokens]) if demand.kind else demand for demand in demands]


def padding_shares(demands: Sequence[Demand]) -> dict[int, float]:
    """For jobs of one size, by the side of each level: the share of unmasked tokens that flow as padding. Empty if
    nothing is padded."""
    num_branches = sum(demand.num_branches for demand in demands)
    nums_all = {side: num_branches * (demands[0].num_tokens // side**2) for side in demands[0].num_masked}
    counts = {side: sum(demand.num_branches * demand.num_masked[side] for demand in demands) for side in nums_all}
    share = common_share((counts[side], num_all) for side, num_all in nums_all.items())
    if share is None:
        return {}
    return {
        side: (padded_count(share, num_all) - counts[side]) / max(num_all - counts[side], 1)
        for side, num_all in nums_all.items()
    }


def pad_demand(demand: Demand, shares: Mapping[int, float]) -> Demand:
    if not shares:
        return demand
    counts = {
        side: num + round(shares[side] * (demand.num_tokens // side**2 - num))
        for side, num in demand.num_masked.items()
    }
    return replace(demand, num_masked=counts, loads_masked=True)


def block_flops(shape: BlockShape, demand: Demand, cached: bool) -> int:
    """FLOPs of one job in a block; a job without activations is dense even if the plan caches the block."""
    num_flowing, num_text = demand.num_flowing(shape, cached), demand.num_flowing_text(cached)
    num_queries = num_flowing + num_text * (shape.joint and shape.sees_text)
    num_image_keys = demand.num_tokens // shape.side**2
    num_pairs = num_queries * (num_image_keys + demand.num_text * shape.sees_text)
    num_pairs += (shape.num_attentions - 1) * num_flowing * num_image_keys
    branch = shape.per_token * num_flowing + shape.per_text * num_text + shape.per_pair * num_pairs + shape.per_branch
    projects = cached and demand.kind == "y"
    num_projections = (1 if shape.joint else demand.num_branches) * projects
    num_read = demand.num_rest(shape) + demand.num_padding
    return demand.num_branches * branch + num_projections * shape.per_rest * num_read


def reads_tiles(demand: Demand, plan: Sequence[bool]) -> bool:
    """Return whether convolutions of a job compute masked tiles alone: where every block is cached."""
    return demand.active is not None and demand.kind is not None and all(plan)


def outside_flops(network: NetworkShape, demand: Demand, plan: Sequence[bool] = ()) -> int:
    """FLOPs of one job outside the blocks, with a plan or with every block cached: convolutions, embeddings."""
    share = demand.active if demand.active is not None and reads_tiles(demand, plan) else 1.0
    return demand.num_branches * (round(share * network.per_token * demand.num_tokens) + network.per_branch)


def active_share(network: NetworkShape, num_tokens: int, num_masked: int) -> float | None:
    """About the share of all tiles that have a masked token, for a square mask in a square picture, over all levels;
    None if convolutions are dense."""
    if not network.convolutions:
        return None
    length, masked = math.sqrt(num_tokens), math.sqrt(num_masked)
    touched = [(masked + side * tile) / length for side, tile in network.tiles if num_masked]
    return mean_share(network, [min(share, 1.0) ** 2 for share in touched])


def mean_share(network: NetworkShape, shares: Sequence[float]) -> float:
    """The share of tiles that a pass computes, from those of its levels: lists are padded on some devices."""
    share = sum(shares) / max(len(shares), 1)
    if not network.pads_lists or not share:
        return share
    return min(one for one in SHARES if one >= min(math.ceil(share * NUM_BUCKETS), NUM_BUCKETS)) / NUM_BUCKETS


def convolution_bytes(network: NetworkShape, demand: Demand) -> int:
    """Bytes that the convolutions of one job load at a step, counted as those of a block, for a square picture."""
    if demand.kind is None or demand.active is None:
        return 0
    grid = (math.isqrt(demand.num_tokens),) * 2
    sizes = (
        shape.num_rows(grid) * shape.width * (FLOAT_BYTES if shape.rows == "tiles" else demand.value_bytes)
        for shape in network.convolutions
    )
    return round(demand.num_kept * sum(sizes) / demand.num_served)


def step_flops(network: NetworkShape, demands: Sequence[Demand], plan: Sequence[bool]) -> int:
    blocks = zip(network.blocks, plan, strict=True)
    inside = sum(block_flops(shape, demand, cached) for shape, cached in blocks for demand in demands)
    return inside + sum(outside_flops(network, demand, plan) for demand in demands)


def load_bytes(shape: BlockShape, demand: Demand) -> int:
    """Bytes that a cached block loads for one job: the rows of unmasked tokens and of the text's padding and, after the
    last block of a UNet's transformer, its output rows. A load that serves several steps is counted as the share of
    one."""
    if demand.kind is None:
        return 0
    width = NUM_PARTS[demand.kind] * shape.row_width(demand.kind) + shape.output_width
    num_rows = demand.num_tokens // shape.side**2 if demand.loads_masked else demand.num_rest(shape)
    num_rows += demand.num_padding
    return round(demand.num_kept * num_rows * width * demand.value_bytes / demand.num_served)
