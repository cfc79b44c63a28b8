"""FLOPs from numbers of tokens against those torch counts in a pass; bytes against those of registered activations."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.edits import make_edit
from helpers.names import FAMILIES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from instgenie.cost.network import Demand, common_share, load_bytes, pad_demands, padded_count, step_flops
from instgenie.cost.plan import Plan
from instgenie.engine.demand import make_demand, make_demands
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job
from instgenie.models.flux.network import FluxNetwork
from instgenie.models.flux2.network import Flux2Network
from instgenie.models.loading.dummy import find_dummy, on_meta
from instgenie.models.model import Model
from instgenie.models.qwen.network import QwenNetwork
from instgenie.models.sd3.network import Sd3Network
from instgenie.models.unet import network as unet
from instgenie.models.zimage.network import ZImageNetwork
from instgenie.types import Kind


@torch.inference_mode()
def count_flops(model: Model, jobs: Sequence[Job]) -> int:
    # torch does not count fused attention on a CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.predict(jobs)
    return counter.get_total_flops()


@cache
def registered(model: Model, kind: Kind) -> Activations:
    return register(make_edit(size=(32, 64)).picture, model, (32, 64), steps=1, guidance=1.0, kind=kind)


def make_jobs(model: Model, kind: Kind, plan: Plan) -> list[Job]:
    """Two jobs that differ in mask and branches. They have one step: the first step of a job may do work for others. A
    demand has one number of text tokens, so both prompts have as many words."""
    edits = [
        make_edit(
            size=(32, 64),
            share=share,
            steps=1,
            guidance=guidance,
            true_guidance=guidance,
            negative_prompt="a blue dog",
        )
        for share, guidance in ((0.2, 1.0), (0.5, 3.0))
    ]
    activations = registered(model, kind)
    return [reuse(prepare(edit, model), activations, plan) for edit in edits]


def make_plans(model: Model) -> list[Plan]:
    """All dense, all cached, and only the last block of every run cached."""
    last = tuple(block == length - 1 for length in model.run_lengths for block in range(length))
    return [(False,) * sum(model.run_lengths), (True,) * sum(model.run_lengths), last]


@pytest.mark.parametrize("kind", ["kv", "y"])
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_equal_those_torch_counts(models: dict[str, Model], family: str, kind: Kind) -> None:
    model = models[family]
    network = model.describe()
    assert network.run_lengths == model.run_lengths
    for plan in make_plans(model):
        for chosen in (slice(1), slice(1, 2), slice(2)) if all(plan) else (slice(2),):
            jobs = make_jobs(model, kind, plan)[chosen]
            counted = step_flops(network, [make_demand(job, network) for job in jobs], plan)
            # with y, the modulation of a Flux's recalled rows is not counted
            assert counted == pytest.approx(count_flops(model, jobs), rel=0 if kind == "kv" else 0.03)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["sd", "sdxl", "sd_fill"])
def test_padding_is_counted_as_tokens_that_flow(models: dict[str, Model], family: str) -> None:
    model = models[family]
    network = replace(model.describe(), pads_lists=True)
    jobs = make_jobs(model, "kv", (True,) * sum(model.run_lengths))
    demands = make_demands(jobs, network)
    of_branch = [demand for demand in demands for _ in range(demand.num_branches)]
    for (num_all, _), layout in model.pack(jobs, pads=True).layouts.items():
        side = round((len(jobs[0].masked) / num_all) ** 0.5)
        assert abs(layout.num_computed - sum(demand.num_masked[side] for demand in of_branch)) <= len(of_branch) / 2
    assert [demand.num_masked for demand in demands] != [make_demand(job, network).num_masked for job in jobs]


def test_lists_of_one_size_are_padded_together() -> None:
    def count(*masked: tuple[int, int]) -> list[int]:
        demands = [Demand(num_all, {1: num}, num_text=6, num_branches=2, kind="kv") for num, num_all in masked]
        return [demand.num_masked[1] for demand in pad_demands(demands)]

    assert count((300, 4096)) == [384]
    assert count((300, 4096), (900, 1024)) == [384, 1024]  # of two sizes
    for lists in ([4096, 300], [4000, 4000, 200, 200], [4096, 4096]):
        counts = count(*((num, 4096) for num in lists))
        assert max(counts) <= 4096
        share = common_share([(sum(lists), 4096 * len(lists))])
        assert share is not None
        assert sum(counts) == pytest.approx(padded_count(share, 4096 * len(lists)), abs=len(lists) / 2)
    assert count((0, 4096)) == [0]
    dense = Demand(4096, {1: 300}, num_text=6)
    assert pad_demands([dense]) == [dense]


@pytest.mark.parametrize("kind", ["kv", "y"])
@pytest.mark.parametrize("family", ["blend", "sd", "sdxl", "sd_fill", "sd3", "klein", "qwen", "qwen_edit", "zimage"])
def test_bytes_equal_those_registered(models: dict[str, Model], family: str, kind: Kind) -> None:
    """If nothing is masked, a step loads all of its activations."""
    model = models[family]
    network = model.describe()
    job = make_jobs(model, kind, (True,) * sum(model.run_lengths))[0]
    demand = make_demand(job, network)
    nothing = replace(demand, num_masked=dict.fromkeys(demand.num_masked, 0))
    assert job.activations is not None
    kept = sum(rows[:, 0].nbytes for rows in job.activations.rows)
    assert sum(load_bytes(shape, nothing) for shape in network.blocks) == kept
    assert 0 < sum(load_bytes(shape, demand) for shape in network.blocks) < kept


def test_a_job_without_activations_is_dense_in_any_plan(models: dict[str, Model]) -> None:
    network = models["fill"].describe()
    demand = Demand(num_tokens=64, num_masked={1: 10}, num_text=6)
    num_blocks = len(network.blocks)
    assert step_flops(network, [demand], [True] * num_blocks) == step_flops(network, [demand], [False] * num_blocks)
    assert not any(load_bytes(shape, demand) for shape in network.blocks)


def test_dense_steps_of_an_edit_demand_no_activations(models: dict[str, Model]) -> None:
    model = models["fill"]
    job = make_jobs(model, "kv", (True,) * sum(model.run_lengths))[0]
    assert make_demand(job, model.describe()).kind == "kv"
    job.edit = replace(job.edit, dense_steps=1)
    assert make_demand(job, model.describe()).kind is None
    job.step = 1
    assert make_demand(job, model.describe()).kind == "kv"


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_text", "num_branches", "tera_flops", "kv_mega_bytes"),
    [
        ("flux.1-dev", 4096, 512, 1, 74.4, 2869),
        ("flux.2-klein-4b", 8192, 512, 1, 76.7, 2517),
        ("flux.2-klein-9b", 8192, 512, 1, 161.2, 4295),
        ("qwen-image", 4096, 32, 2, 137.4, 6040),
        ("qwen-image-edit", 8192, 1402, 2, 396.5, 12080),
        ("sd3.5-large", 4096, 333, 2, 62.2, 3028),
        ("sdxl-base-1.0", 16384, 77, 2, 13.5, 923),
        ("z-image-turbo", 4096, 64, 1, 55.56, 2013),
    ],
)
def test_published_architectures(
    name: str, num_tokens: int, num_text: int, num_branches: int, tera_flops: float, kv_mega_bytes: float
) -> None:
    """FLOPs of a dense step of one picture, and the bytes of its activations at two bytes per value."""
    _, recipe = find_dummy(name)
    part = on_meta(recipe.network)
    views = {
        "flux.1": FluxNetwork,
        "flux.2": Flux2Network,
        "qwen": QwenNetwork,
        "sd3.5": Sd3Network,
        "z-image": ZImageNetwork,
    }
    view = next((view for start, view in views.items() if name.startswith(start)), None)
    network = view(part).describe() if view else unet.describe(part)
    sides = {shape.side for shape in network.blocks}
    demand = Demand(num_tokens, dict.fromkeys(sides, 0), num_text, num_branches, "kv", num_kept=num_branches)
    assert step_flops(network, [demand], [False] * len(network.blocks)) / 1e12 == pytest.approx(tera_flops, rel=0.005)
    num_bytes = sum(load_bytes(shape, demand) for shape in network.blocks)
    assert num_bytes / 1e6 == pytest.approx(kv_mega_bytes, rel=0.005)
