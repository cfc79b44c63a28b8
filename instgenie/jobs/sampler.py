"""Sampler steps as pure functions, and the tables they walk along. Takes tables from diffusers' schedulers, not their
stepping; knows no model.

A schedule describes the steps of one edit. It is frozen and holds no current step: the number of a step is an argument.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from instgenie.errors import EditError

Prediction = Literal["epsilon", "v_prediction"]


class Schedule(Protocol):
    """The steps of one edit, from noise to clean."""

    @property
    def num_steps(self) -> int: ...

    @property
    def levels(self) -> tuple[float, ...]:
        """Numbers that distinguish this schedule from any other."""

    def timestep(self, step: int) -> float:
        """The timestep that the model sees at a step."""

    def start(self, clean: Tensor, noise: Tensor) -> Tensor:
        """The latents that masked tokens start from."""

    def noised(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        """Add noise to clean tokens, to the level of a step."""

    def scaled(self, x: Tensor, step: int) -> Tensor:
        """Scale latents to the model's input."""

    def advanced(self, x: Tensor, prediction: Tensor, step: int) -> Tensor:
        """Take a step with the model's prediction."""

    def foreseen(self, x: Tensor, x_next: Tensor, step: int) -> Tensor:
        """Extrapolate the line on which a step moved to its clean end."""


@dataclass(frozen=True)
class FlowSchedule:
    sigmas: tuple[float, ...]  # [steps + 1], the last one is the clean end

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def levels(self) -> tuple[float, ...]:
        return self.sigmas

    def timestep(self, step: int) -> float:
        return self.sigmas[step]

    def start(self, clean: Tensor, noise: Tensor) -> Tensor:
        return self.noised(clean, noise, 0)

    def noised(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        return flow_noise(clean, noise, self.sigmas[step])

    def scaled(self, x: Tensor, step: int) -> Tensor:
        return x

    def advanced(self, x: Tensor, prediction: Tensor, step: int) -> Tensor:
        return flow_euler(x, prediction, self.sigmas[step], self.sigmas[step + 1])

    def foreseen(self, x: Tensor, x_next: Tensor, step: int) -> Tensor:
        return extrapolated(x, x_next, self.sigmas[step], self.sigmas[step + 1])


@dataclass(frozen=True)
class DdimSchedule:
    timesteps: tuple[float, ...]  # [steps]
    alphas: tuple[float, ...]  # [steps], squared share of the clean picture
    alphas_next: tuple[float, ...]  # [steps], after each step; diffusers' rounding of timesteps makes it its own table
    prediction: Prediction
    from_noise: bool  # True if it starts from noise alone

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def levels(self) -> tuple[float, ...]:
        return self.timesteps + self.alphas

    def timestep(self, step: int) -> float:
        return self.timesteps[step]

    def start(self, clean: Tensor, noise: Tensor) -> Tensor:
        return noise if self.from_noise else self.noised(clean, noise, 0)

    def noised(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        signal, spread = shares(self.alphas[step])
        return signal * clean + spread * noise

    def scaled(self, x: Tensor, step: int) -> Tensor:
        return x

    def advanced(self, x: Tensor, prediction: Tensor, step: int) -> Tensor:
        return ddim(x, prediction, self.alphas[step], self.alphas_next[step], self.prediction)

    def foreseen(self, x: Tensor, x_next: Tensor, step: int) -> Tensor:
        """DDIM moves on a line once the clean picture's share is divided out."""
        signal, spread = shares(self.alphas[step])
        signal_next, spread_next = shares(self.alphas_next[step])
        return extrapolated(x / signal, x_next / signal_next, spread / signal, spread_next / signal_next)


@dataclass(frozen=True)
class EulerSchedule:
    timesteps: tuple[float, ...]  # [steps]
    sigmas: tuple[float, ...]  # [steps + 1], the last one is the end
    prediction: Prediction
    start_sigma: float  # of the pure noise that it starts from; 0 if it starts from the noised picture

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    @property
    def levels(self) -> tuple[float, ...]:
        return self.timesteps + self.sigmas

    def timestep(self, step: int) -> float:
        return self.timesteps[step]

    def start(self, clean: Tensor, noise: Tensor) -> Tensor:
        return self.start_sigma * noise if self.start_sigma else self.noised(clean, noise, 0)

    def noised(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        return clean + self.sigmas[step] * noise

    def scaled(self, x: Tensor, step: int) -> Tensor:
        return x / math.sqrt(self.sigmas[step] ** 2 + 1)

    def advanced(self, x: Tensor, prediction: Tensor, step: int) -> Tensor:
        return euler(x, prediction, self.sigmas[step], self.sigmas[step + 1], self.prediction)

    def foreseen(self, x: Tensor, x_next: Tensor, step: int) -> Tensor:
        return extrapolated(x, x_next, self.sigmas[step], self.sigmas[step + 1])


def flow_euler(x: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> Tensor:
    return x + (sigma_next - sigma) * velocity


def flow_noise(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    return (1 - sigma) * clean + sigma * noise


def extrapolated(x: Tensor, x_next: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """The end without noise of the line through two points."""
    return x_next + sigma_next / (sigma - sigma_next) * (x_next - x)


def ddim(x: Tensor, predicted: Tensor, alpha: float, alpha_next: float, prediction: Prediction) -> Tensor:
    """A deterministic DDIM step (eta 0)."""
    signal, spread = shares(alpha)
    signal_next, spread_next = shares(alpha_next)
    if prediction == "epsilon":
        clean, noise = (x - spread * predicted) / signal, predicted
    else:
        clean, noise = signal * x - spread * predicted, signal * predicted + spread * x
    return signal_next * clean + spread_next * noise


def shares(alpha: float) -> tuple[float, float]:
    """The shares of the clean picture and of the noise."""
    return math.sqrt(alpha), math.sqrt(1 - alpha)


def euler(x: Tensor, predicted: Tensor, sigma: float, sigma_next: float, prediction: Prediction) -> Tensor:
    """An Euler step without churn."""
    if prediction == "epsilon":
        return x + (sigma_next - sigma) * predicted
    clean = x / (sigma**2 + 1) - sigma / math.sqrt(sigma**2 + 1) * predicted
    return x + (sigma_next - sigma) / sigma * (x - clean)


def flow_schedule(
    scheduler: FlowMatchEulerDiscreteScheduler,
    steps: int,
    num_tokens: int,
    strength: float = 1.0,
    own_spacing: bool = False,
    shift: float | None = None,
) -> FlowSchedule:
    """Without a `shift`, the scheduler's own for the number of tokens."""
    return FlowSchedule(tuple(flow_sigmas(scheduler, steps, num_tokens, strength, own_spacing, shift).tolist()))


def ddim_schedule(scheduler: DDIMScheduler, steps: int, strength: float = 1.0) -> DdimSchedule:
    table = copy.copy(scheduler)  # set_timesteps changes the object; the caller's is not changed
    table.set_timesteps(steps)
    timesteps = table.timesteps.tolist()[num_skipped(steps, strength) :]
    stride = table.config.num_train_timesteps // steps
    alphas, end = table.alphas_cumprod.tolist(), float(table.final_alpha_cumprod)
    if timesteps[0] >= len(alphas):
        raise EditError(f"the number of steps is {steps}: this model takes fewer than {len(alphas)}")
    return DdimSchedule(
        timesteps=tuple(timesteps),
        alphas=tuple(alphas[timestep] for timestep in timesteps),
        alphas_next=tuple(alphas[timestep - stride] if timestep >= stride else end for timestep in timesteps),
        prediction=table.config.prediction_type,
        from_noise=strength == 1,
    )


def euler_schedule(scheduler: EulerDiscreteScheduler, steps: int, strength: float = 1.0) -> EulerSchedule:
    table = copy.copy(scheduler)
    table.set_timesteps(steps)
    skipped = num_skipped(steps, strength)
    return EulerSchedule(
        timesteps=tuple(table.timesteps.tolist()[skipped:]),
        sigmas=tuple(table.sigmas.tolist()[skipped:]),
        prediction=table.config.prediction_type,
        start_sigma=float(table.init_noise_sigma) if strength == 1 else 0.0,
    )


def num_skipped(steps: int, strength: float) -> int:
    """The number of steps that a strength skips, as in the Stable Diffusion pipelines; at least one step is left."""
    return steps - max(min(int(steps * strength), steps), 1)


def flow_sigmas(
    scheduler: FlowMatchEulerDiscreteScheduler,
    steps: int,
    num_tokens: int,
    strength: float = 1.0,
    own_spacing: bool = False,
    shift: float | None = None,
) -> Tensor:  # [steps run + 1], the last one is the clean end
    """Noise levels before the shift fall evenly from 1 to 1/steps or, with `own_spacing`, to the scheduler's least."""
    table = copy.copy(scheduler)
    if scheduler.config.shift_terminal and steps < 2:
        raise EditError(f"the number of steps is {steps}: this model takes at least 2")
    spacing: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
    if own_spacing:
        spacing = {"num_inference_steps": steps}
    table.set_timesteps(**spacing, mu=flow_shift(scheduler, num_tokens) if shift is None else shift)
    num_skipped = int(max(steps - min(steps * strength, steps), 0))
    sigmas: Tensor = table.sigmas[num_skipped:]
    return sigmas


def flow_shift(scheduler: FlowMatchEulerDiscreteScheduler, num_tokens: int) -> float | None:
    """The shift for a number of tokens, on a line through the scheduler's two points: more tokens, more noise."""
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return None
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    shift: float = config.base_shift + slope * (num_tokens - config.base_image_seq_len)
    return shift


def flow_strength(scheduler: FlowMatchEulerDiscreteScheduler, num_tokens: int, sigma: float) -> float:
    """The strength at which a schedule of many steps starts with the noise level `sigma`."""
    shift, config = flow_shift(scheduler, num_tokens), scheduler.config
    if shift is None:
        factor = float(config.shift)
    else:
        factor = math.exp(shift) if config.time_shift_type == "exponential" else shift
    return sigma / (sigma + factor * (1 - sigma))
