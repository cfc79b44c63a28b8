"""Sampler steps and sigma tables against diffusers' scheduler."""

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusionInpaintPipeline,
)
from diffusers.pipelines.flux.pipeline_flux_inpaint import FluxInpaintPipeline, calculate_shift, retrieve_timesteps

from instgenie.jobs.sampler import (
    ddim_schedule,
    euler_schedule,
    flow_euler,
    flow_noise,
    flow_schedule,
    flow_sigmas,
    flow_strength,
)

CONFIGS = [
    {"shift": 1.0},
    {"shift": 3.0},
    {"use_dynamic_shifting": True, "shift": 3.0},
    {"use_dynamic_shifting": True, "time_shift_type": "linear", "base_shift": 0.7, "max_shift": 1.4},
    {"use_dynamic_shifting": True, "base_image_seq_len": 64, "max_image_seq_len": 1024},
    {"use_karras_sigmas": True},
]


def stock_sigmas(
    scheduler: FlowMatchEulerDiscreteScheduler, steps: int, num_tokens: int, strength: float
) -> torch.Tensor:
    pipeline = FluxInpaintPipeline.__new__(FluxInpaintPipeline)
    pipeline.scheduler = scheduler
    config = scheduler.config
    mu = calculate_shift(
        num_tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    retrieve_timesteps(scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    pipeline.get_timesteps(steps, strength, "cpu")
    return scheduler.sigmas[scheduler.begin_index :]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("steps", "strength"), [(1, 1.0), (4, 1.0), (28, 1.0), (28, 0.6), (7, 0.31), (5, 0.01)])
def test_sigmas_are_the_stock_pipelines(config: dict[str, float], steps: int, strength: float) -> None:
    ours = flow_sigmas(FlowMatchEulerDiscreteScheduler(**config), steps, 384, strength)
    torch.testing.assert_close(ours, stock_sigmas(FlowMatchEulerDiscreteScheduler(**config), steps, 384, strength))
    assert ours[-1] == 0
    assert len(ours) >= 2


@pytest.mark.parametrize("config", [{}, {"shift": 3.0}, {"use_dynamic_shifting": True}])
def test_a_strength_starts_at_its_noise_level(config: dict[str, float]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    strength = flow_strength(scheduler, 4096, 0.9)
    assert flow_sigmas(scheduler, 1000, 4096, strength)[0] == pytest.approx(0.9, abs=0.005)


def test_sigmas_leave_the_scheduler_as_it_is() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    before = scheduler.sigmas.clone(), scheduler.timesteps.clone(), dict(scheduler.config)
    flow_sigmas(scheduler, 9, 256, 0.5)
    assert torch.equal(scheduler.sigmas, before[0])
    assert torch.equal(scheduler.timesteps, before[1])
    assert dict(scheduler.config) == before[2]


def test_steps_and_noise_are_the_schedulers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    scheduler.set_timesteps(5)
    scheduler.set_begin_index(0)
    x, velocity, noise = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    sigmas = scheduler.sigmas.tolist()
    torch.testing.assert_close(
        flow_noise(x, noise, sigmas[0]), scheduler.scale_noise(x, scheduler.timesteps[:1], noise)
    )
    for timestep, sigma, sigma_next in zip(scheduler.timesteps, sigmas, sigmas[1:], strict=False):
        ours = flow_euler(x, velocity, sigma, sigma_next)
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        torch.testing.assert_close(ours, x)
        torch.testing.assert_close(
            flow_noise(x, noise, sigma_next), scheduler.scale_noise(x, scheduler.timesteps[:1], noise)
        )


DDIM_CONFIGS = [
    {"steps_offset": 1, "set_alpha_to_one": False},
    {"timestep_spacing": "trailing"},
    {"timestep_spacing": "linspace", "beta_schedule": "scaled_linear"},
    {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True},
]
EULER_CONFIGS = [
    {"timestep_spacing": "leading", "steps_offset": 1},
    {"timestep_spacing": "trailing"},
    {"use_karras_sigmas": True},
    {"final_sigmas_type": "sigma_min"},
    {"timestep_type": "continuous"},
]
SCHEDULES = [
    *((DDIMScheduler, ddim_schedule, {"clip_sample": False} | config) for config in DDIM_CONFIGS),
    *((EulerDiscreteScheduler, euler_schedule, config) for config in EULER_CONFIGS),
]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(("steps", "strength"), [(1, 1.0), (4, 1.0), (7, 1.0), (10, 0.55)])
@pytest.mark.parametrize(("make", "tabulate", "config"), SCHEDULES)
def test_a_schedule_is_the_schedulers_stepping(make, tabulate, config, steps, strength, prediction) -> None:
    if config.get("rescale_betas_zero_snr") and prediction == "epsilon":
        pytest.skip("noise alone tells nothing about the picture")
    scheduler = make(prediction_type=prediction, **config)
    before = dict(scheduler.config), scheduler.timesteps.clone()
    schedule = tabulate(scheduler, steps, strength)
    assert (dict(scheduler.config), scheduler.timesteps.tolist()) == (before[0], before[1].tolist())

    pipeline = StableDiffusionInpaintPipeline.__new__(StableDiffusionInpaintPipeline)
    pipeline.scheduler = scheduler
    scheduler.set_timesteps(steps)
    timesteps, num_steps = pipeline.get_timesteps(steps, strength, "cpu")
    assert schedule.num_steps == num_steps
    assert schedule.timesteps == pytest.approx(timesteps.tolist())
    clean, noise, predicted = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    started = noise * scheduler.init_noise_sigma if strength == 1 else scheduler.add_noise(clean, noise, timesteps[:1])
    torch.testing.assert_close(schedule.start(clean, noise), started)
    x = clean
    for step, timestep in enumerate(timesteps):
        torch.testing.assert_close(schedule.scaled(x, step), scheduler.scale_model_input(x, timestep))
        torch.testing.assert_close(
            schedule.noised(clean, noise, step), scheduler.add_noise(clean, noise, timesteps[step : step + 1])
        )
        ours = schedule.advanced(x, predicted, step)
        x = scheduler.step(predicted, timestep, x, return_dict=False)[0]
        torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-4)


def test_one_step_is_always_left() -> None:
    assert (
        ddim_schedule(DDIMScheduler(), 6, 0.01).num_steps
        == euler_schedule(EulerDiscreteScheduler(), 6, 0.01).num_steps
        == 1
    )


@pytest.mark.parametrize("kind", ["flow", "ddim", "euler"])
def test_a_perfect_prediction_foresees_the_clean_end(kind: str) -> None:
    schedule = {
        "flow": lambda: flow_schedule(FlowMatchEulerDiscreteScheduler(shift=3.0), 6, 16),
        "ddim": lambda: ddim_schedule(DDIMScheduler(), 6),
        "euler": lambda: euler_schedule(EulerDiscreteScheduler(), 6),
    }[kind]()
    clean, noise = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    perfect = noise - clean if kind == "flow" else noise
    for step in range(schedule.num_steps):
        x = schedule.noised(clean, noise, step)
        seen = schedule.foreseen(x, schedule.advanced(x, perfect, step), step)
        torch.testing.assert_close(seen, clean, atol=1e-6, rtol=0)
