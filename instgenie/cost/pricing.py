"""Makes the table of step costs from the latency model and the planner. Knows shapes and plans; knows no model and no
worker."""

from dataclasses import dataclass, replace

from instgenie.cost.kept_steps import stride_of
from instgenie.cost.latency import Latency
from instgenie.cost.network import (
    Demand,
    NetworkShape,
    active_share,
    convolution_bytes,
    load_bytes,
    pad_demands,
)
from instgenie.cost.plan import is_cached
from instgenie.cost.planner import plan_batch
from instgenie.cost.table import Price, StepCosts
from instgenie.types import Kind, PlanPolicy, TierName

RATIOS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)  # mask ratios of the table
FETCH: dict[TierName, tuple[float, float]] = {  # typical seconds of a fetch, fixed and per byte
    "disk": (0.01, 1 / 1e9),
    "peer": (0.005, 1 / 300e6),
    "remote": (0.2, 1 / 100e6),
}


@dataclass(frozen=True)
class JobShape:
    """The numbers that all jobs of a model share."""

    network: NetworkShape
    num_text: int
    num_branches: int = 1
    value_bytes: float = 2  # per value in the activations
    stride: int = 1  # every so many steps are kept; 0: see `stride_of`
    num_steps: int = 28  # of a usual job
    kind: Kind = "kv"  # of the activations
    num_prompt: int = 0  # text tokens that are computed where padding is read from activations; 0: all text is computed
    sees_picture: bool = False  # the network sees the picture, or a reference, as so many tokens again

    def num_seen(self, num_tokens: int) -> int:
        return 2 * num_tokens if self.sees_picture else num_tokens

    def demand(self, num_tokens: int, num_masked: int, in_gpu: bool) -> Demand:
        """The demand of a job with activations."""
        demand = Demand(
            num_tokens=self.num_seen(num_tokens),
            num_masked={shape.side: -(-num_masked // shape.side**2) for shape in self.network.blocks},
            num_text=self.num_text,
            num_branches=self.num_branches,
            kind=self.kind,
            value_bytes=self.value_bytes,
            num_served=stride_of(self.stride, self.num_steps),
            num_prompt=self.num_prompt,
            in_gpu=frozenset(range(len(self.network.blocks))) if in_gpu else frozenset(),
            active=active_share(self.network, num_tokens, num_masked),
        )
        return pad_demands([demand])[0] if self.network.pads_lists else demand

    def dense_demand(self, num_tokens: int) -> Demand:
        num_seen = self.num_seen(num_tokens)
        everything = {shape.side: num_seen // shape.side**2 for shape in self.network.blocks}
        return Demand(num_seen, everything, self.num_text, self.num_branches)


def make_costs(
    shape: JobShape, latency: Latency, policy: PlanPolicy, num_tokens: int, is_host_near: bool = False
) -> StepCosts:
    """The costs of jobs of `num_tokens` tokens. If `is_host_near`, steps read main memory directly and load nothing."""

    def column(in_gpu: bool) -> tuple[Price, ...]:
        demands = (shape.demand(num_tokens, round(ratio * num_tokens), in_gpu) for ratio in RATIOS)
        return tuple(price(shape.network, demand, latency, policy) for demand in demands)

    gpu = column(in_gpu=True)
    whole = replace(shape.demand(num_tokens, 0, in_gpu=False), num_served=1, num_prompt=0)
    return StepCosts(
        num_tokens=num_tokens,
        per_step=latency.block * len(shape.network.blocks),
        ratios=RATIOS,
        gpu=gpu,
        host=gpu if is_host_near else column(in_gpu=False),
        dense=price(shape.network, shape.dense_demand(num_tokens), latency, policy)._replace(dense=1.0),
        per_pass=latency.block * len(shape.network.blocks) if shape.network.dense_apart else 0.0,
        bytes_per_token=step_bytes(shape.network, whole) / num_tokens,
        num_text=shape.num_text if shape.num_prompt else 0,
        stride=shape.stride,
        fetch=FETCH,
    )


def step_bytes(network: NetworkShape, whole: Demand) -> int:
    """Bytes of all that activations keep of a step, for a job that reads all of it."""
    return sum(load_bytes(block, whole) for block in network.blocks) + convolution_bytes(network, whole)


def price(network: NetworkShape, demand: Demand, latency: Latency, policy: PlanPolicy) -> Price:
    """The price of a job that is planned alone. Time that neither stream hides, such as the first load or the last
    block, counts in both streams."""
    planned = plan_batch(network, [demand], latency, policy=policy)
    blocks = list(enumerate(latency.block_costs(network, [demand], planned.plan)))
    outside = latency.outside(network, [demand], planned.plan)
    compute = outside + sum(cost.cached if is_cached(planned.plan, block) else cost.dense for block, cost in blocks)
    load = sum(cost.load for block, cost in blocks if is_cached(planned.plan, block))
    unhidden = outside + planned.seconds - max(compute, load)
    return Price(compute - latency.block * len(blocks) + unhidden, load + unhidden)
