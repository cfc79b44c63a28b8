"""The ragged forward pass against diffusers' own, token by token."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.edits import make_edit
from helpers.names import FLUX_FAMILIES
from torch import Tensor

from instgenie.jobs.job import Branch, Job, Template
from instgenie.jobs.sampler import FlowSchedule
from instgenie.models.flux.model import FluxModel
from instgenie.models.flux.network import embed_positions
from instgenie.models.joint.batch import pack
from instgenie.models.joint.network import velocity


@dataclass(frozen=True)
class Sequence:
    """The inputs of one call of diffusers' transformer."""

    image: Tensor  # [tokens, channels]
    text: Tensor  # [text tokens, text channels]
    pooled: Tensor
    grid: tuple[int, int]
    sigma: float
    guidance: float


SHAPES = [(4, (3, 5), 0.9, 1.0), (6, (2, 2), 0.35, 30.0), (4, (4, 4), 1.0, 3.5)]


def make_sequences(model: FluxModel) -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    config = model.transformer.config

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        Sequence(
            random(rows * cols, config.in_channels),
            random(num_text, config.joint_attention_dim),
            random(config.pooled_projection_dim),
            (rows, cols),
            sigma,
            guidance,
        )
        for num_text, (rows, cols), sigma, guidance in SHAPES
    ]


def stock(model: FluxModel, sequence: Sequence, dtype: torch.dtype) -> Tensor:
    rows, cols = sequence.grid
    positions = torch.zeros(rows, cols, 3)
    positions[..., 1] += torch.arange(rows)[:, None]
    positions[..., 2] += torch.arange(cols)
    timestep = torch.tensor([sequence.sigma]) * 1000
    has_guidance = model.transformer.config.guidance_embeds
    return model.transformer(
        hidden_states=sequence.image[None].to(dtype),
        timestep=timestep.to(dtype) / 1000,
        guidance=torch.tensor([sequence.guidance]) if has_guidance else None,
        pooled_projections=sequence.pooled[None].to(dtype),
        encoder_hidden_states=sequence.text[None].to(dtype),
        txt_ids=torch.zeros(len(sequence.text), 3),
        img_ids=positions.view(-1, 3),
    ).sample[0]


def ragged(model: FluxModel, sequences: list[Sequence], dtype: torch.dtype) -> list[Tensor]:
    batch = pack([make_job(model, sequence, dtype) for sequence in sequences])
    return list(velocity(model.joint_network, batch).split(batch.layout.num_image))


def make_job(model: FluxModel, sequence: Sequence, dtype: torch.dtype) -> Job:
    text = model.joint_network.embed_prompt(sequence.text.to(dtype))
    rotary = embed_positions(model.transformer, len(text), sequence.grid)
    image = sequence.image
    return Job(
        edit=make_edit(guidance=sequence.guidance),
        grid=sequence.grid,
        template=Template(image, image),
        masked=torch.ones(len(image), 1, dtype=torch.bool),
        conditioning=image[:, :0],
        branches=(Branch(text, sequence.pooled.to(dtype), rotary),),
        scale=1.0,
        schedule=FlowSchedule((sequence.sigma, 0.0)),
        latents=image,
    )


@pytest.fixture(params=[*FLUX_FAMILIES, "builtin"])
def model(request: pytest.FixtureRequest, models: dict[str, FluxModel]) -> FluxModel:
    return models[request.param]


@torch.no_grad()
def test_ragged_is_diffusers(model: FluxModel) -> None:
    check_ragged(model, torch.float32, tolerance=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", FLUX_FAMILIES)
def test_ragged_is_diffusers_in_bfloat16(models: dict[str, FluxModel], family: str) -> None:
    model = models[family]
    rounded = replace(model, transformer=copy.deepcopy(model.transformer).to(torch.bfloat16))
    check_ragged(rounded, torch.bfloat16, tolerance=0.03)


def check_ragged(model: FluxModel, dtype: torch.dtype, tolerance: float) -> None:
    sequences = make_sequences(model)
    expected = [stock(model, sequence, dtype) for sequence in sequences]
    together = ragged(model, sequences, dtype)
    for sequence, batched, truth in zip(sequences, together, expected, strict=True):
        [alone] = ragged(model, [sequence], dtype)
        assert alone.dtype == truth.dtype == dtype
        size = truth.abs().max()
        assert size > 0.5
        assert (alone - truth).abs().max() / size < tolerance
        assert (batched - truth).abs().max() / size < tolerance


@torch.no_grad()
def test_branches_do_not_see_each_other(model: FluxModel) -> None:
    first, second, third = make_sequences(model)
    changed = Sequence(-second.image, -second.text, -second.pooled, second.grid, 0.8, 2.0)
    before = ragged(model, [first, second, third], torch.float32)
    after = ragged(model, [first, changed, third], torch.float32)
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(after[2], before[2])
    assert (after[1] - before[1]).abs().max() > 0.1
