"""Sampler steps as pure functions. Takes sigma tables from diffusers' scheduler, not its stepping; knows no model."""

import copy

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor


def flow_euler(x: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> Tensor:
    return x + (sigma_next - sigma) * velocity


def flow_noise(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    return (1 - sigma) * clean + sigma * noise


def flow_sigmas(
    scheduler: FlowMatchEulerDiscreteScheduler, steps: int, num_tokens: int, strength: float = 1.0
) -> Tensor:  # [steps run + 1], the last one is the clean end
    table = copy.copy(scheduler)  # set_timesteps writes into the object; the caller's stays as it is
    table.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=flow_shift(scheduler, num_tokens))
    num_skipped = int(max(steps - min(steps * strength, steps), 0))
    sigmas: Tensor = table.sigmas[num_skipped:]
    return sigmas


def flow_shift(scheduler: FlowMatchEulerDiscreteScheduler, num_tokens: int) -> float | None:
    """More tokens, more noise: a line through the scheduler's two (tokens, shift) points."""
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return None
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    shift: float = config.base_shift + slope * (num_tokens - config.base_image_seq_len)
    return shift
