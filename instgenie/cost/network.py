"""What a step computes and moves: FLOPs and bytes of every block, from numbers of tokens. Knows shapes; knows no time.

A model describes its network once, as plain numbers, so that whoever asks what a step will cost needs neither torch nor
the model. All tokens of a job flow through a dense block, the masked ones through a cached block; keys are of all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from instgenie.types import NUM_PARTS, Kind

NUM_BUCKETS = 32  # lists of masked tokens are padded to so many parts of all tokens, or fewer
SHARES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # of those, the ones that the lists of a batch are padded to together


@dataclass(frozen=True)
class BlockShape:
    """FLOPs of one block for one branch, where a product of m by k by n is 2mkn of them."""

    per_token: int  # for each image token that flows
    per_text: int  # for each text token
    per_rest: int  # for each unmasked token whose K and V are projected from its Y
    per_pair: int  # for each query and each key
    per_branch: int
    width: int  # of a row of K, of V, of Y
    width_behind: int = 0  # of the rows kept behind the last block of a UNet's transformer
    side: int = 1  # of the square of tokens that one token of this level stands for
    joint: bool = False  # text flows with the image, and the branches of a job share what activations keep


@dataclass(frozen=True)
class NetworkShape:
    blocks: tuple[BlockShape, ...]
    run_lengths: tuple[int, ...]  # numbers of blocks in the runs in which dropped tokens stay dropped
    per_token: int  # FLOPs outside the blocks for each image token of each branch, masked or not
    per_branch: int
    pads: bool = False  # whether the lists of masked tokens of all jobs are padded together; see `common_share`
    apart: bool = False  # whether jobs that compute every token pass through it apart from those that read activations


@dataclass(frozen=True)
class Demand:
    """One job of a step, as numbers."""

    num_tokens: int
    num_masked: dict[int, int]  # at every level: its side, and how many of its tokens are masked
    num_text: int
    num_branches: int = 1
    kind: Kind | None = None  # of its template's activations; None = there are none, every block is dense
    num_kept: int = 1  # branches that the activations keep
    value_bytes: int = 2  # of one value in the activations
    in_gpu: frozenset[int] = frozenset()  # blocks whose rows of this step are there already
    loads_all: bool = False  # rows of masked tokens too

    def num_flowing(self, shape: BlockShape, cached: bool) -> int:
        return self.num_masked[shape.side] if cached and self.kind else self.num_tokens // shape.side**2

    def num_rest(self, shape: BlockShape) -> int:
        return self.num_tokens // shape.side**2 - self.num_masked[shape.side]


def count_passes(network: NetworkShape, demands: Sequence[Demand]) -> int:
    return len({demand.kind is None for demand in demands}) if network.apart else 1


def common_share(counts: Iterable[tuple[int, int]]) -> int | None:
    """The share to which the lists of a batch are padded at every level, given as counts of masked tokens among all of
    the batch: one of a few, so that few shapes serve all batches. None where there is no token to pad with."""
    pairs = list(counts)
    if not pairs or not all(count for count, _ in pairs):
        return None
    needed = max(-(-count * NUM_BUCKETS // num_all) for count, num_all in pairs)
    return min(share for share in SHARES if share >= needed)


def padded_count(share: int, num_all: int) -> int:
    return num_all * share // NUM_BUCKETS


def pad_demands(demands: Sequence[Demand]) -> list[Demand]:
    """As they flow through a network that pads, where jobs of one size pass together. What their lists are filled up
    with is counted as if it attended, too."""
    sizes = {demand.num_tokens for demand in demands if demand.kind}
    filling = {size: find_filling([one for one in demands if one.kind and one.num_tokens == size]) for size in sizes}
    return [fill_up(demand, filling[demand.num_tokens]) if demand.kind else demand for demand in demands]


def find_filling(demands: Sequence[Demand]) -> dict[int, float]:
    """Of jobs of one size, at every level: how much of what is not masked flows all the same. Empty where nothing is
    filled up."""
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


def fill_up(demand: Demand, filling: Mapping[int, float]) -> Demand:
    if not filling:
        return demand
    counts = {
        side: num + round(filling[side] * (demand.num_tokens // side**2 - num))
        for side, num in demand.num_masked.items()
    }
    return replace(demand, num_masked=counts, loads_all=True)


def block_flops(shape: BlockShape, demand: Demand, cached: bool) -> int:
    """Of a job; a job without activations is never cached."""
    num_flowing = demand.num_flowing(shape, cached)
    num_queries = num_flowing + demand.num_text * shape.joint
    num_keys = demand.num_tokens // shape.side**2 + demand.num_text
    branch = (
        shape.per_token * num_flowing
        + shape.per_text * demand.num_text
        + shape.per_pair * num_queries * num_keys
        + shape.per_branch
    )
    projects = cached and demand.kind == "y"
    num_projections = (1 if shape.joint else demand.num_branches) * projects
    return demand.num_branches * branch + num_projections * shape.per_rest * demand.num_rest(shape)


def outside_flops(network: NetworkShape, demand: Demand) -> int:
    return demand.num_branches * (network.per_token * demand.num_tokens + network.per_branch)


def step_flops(network: NetworkShape, demands: Sequence[Demand], plan: Sequence[bool]) -> int:
    blocks = zip(network.blocks, plan, strict=True)
    inside = sum(block_flops(shape, demand, cached) for shape, cached in blocks for demand in demands)
    return inside + sum(outside_flops(network, demand) for demand in demands)


def load_bytes(shape: BlockShape, demand: Demand) -> int:
    """Rows of unmasked tokens that a cached block reads; the last of a UNet's transformer also reads what left it."""
    if demand.kind is None:
        return 0
    width = NUM_PARTS[demand.kind] * shape.width + shape.width_behind
    num_rows = demand.num_tokens // shape.side**2 if demand.loads_all else demand.num_rest(shape)
    return demand.num_kept * num_rows * width * demand.value_bytes
