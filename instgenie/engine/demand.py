"""Demands: jobs as numbers for the planner. Knows jobs and their activations; decides nothing."""

from collections.abc import Sequence
from dataclasses import replace

from instgenie.cost.network import VALUE_BYTES, Demand, NetworkShape, mean_share, pad_demands
from instgenie.engine.loading.route import sharing_key
from instgenie.jobs.job import Job, reads_convolutions


def make_demands(jobs: Sequence[Job], network: NetworkShape) -> list[Demand]:
    """Describe the current step of the jobs. Rows that several jobs share are loaded for the first of them."""
    demands = []
    loaded: set[object] = set()
    for job in jobs:
        demand = make_demand(job, network)
        if demand.kind is not None:
            if sharing_key(job) in loaded:
                demand = replace(demand, in_gpu=frozenset(range(len(network.blocks))))
            loaded.add(sharing_key(job))
        demands.append(demand)
    return pad_demands(demands) if network.pads_lists else demands


def make_demand(job: Job, network: NetworkShape) -> Demand:
    """Describe the current step of a job. Activations on the job's device need no loading."""
    sides = {shape.side for shape in network.blocks}
    demand = Demand(
        num_tokens=job.num_seen,
        num_masked={side: len(job.level(len(job.masked) // side**2).inside) for side in sides},
        num_text=len(job.branches[0].text),
        num_branches=len(job.branches),
    )
    if job.activations is None or job.in_dense_steps:
        return demand
    cache = job.activations
    rows = cache.rows[0]
    return replace(
        demand,
        kind=cache.kind,
        num_kept=cache.num_branches,
        value_bytes=VALUE_BYTES.get(cache.key.cache_dtype, rows.element_size()),
        num_served=cache.key.stride,
        num_prompt=job.num_prompt if cache.num_text else 0,
        in_gpu=frozenset(range(len(network.blocks))) if rows.device == job.masked.device else frozenset(),
        active=active_tiles(job, network) if reads_convolutions(job, (True,) * cache.num_blocks) else None,
    )


def active_tiles(job: Job, network: NetworkShape) -> float:
    """The share of all tiles that have a masked token, over all levels."""
    shares = []
    for side, tile in network.tiles:
        grid = job.grid[0] // side, job.grid[1] // side
        tiles = job.level(grid[0] * grid[1]).tiles(grid, tile)
        shares.append(len(tiles.active) / tiles.num_all)
    return mean_share(network, shares)
