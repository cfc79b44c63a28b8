"""Shared by the training loops: the Muon optimiser, an average of the weights, a clock, checkpoints."""

import json
import math
import time
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from instgenie.machine.files import complete_file


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices; all matrices of one shape are orthogonalised in one batched product.

    torch.optim.Muon walks the matrices one by one, a fifth of the step time at this model's size.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                buffers = [self._buffer(p) for p in parameters]
                grads = [p.grad for p in parameters]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                torch._foreach_lerp_(grads, buffers, group["momentum"])
                updates = orthogonalise(torch.stack(grads))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                step = -group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype).unbind()), alpha=step)

    def _buffer(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices [n, rows, columns], by Newton-Schulz with Muon's quintic."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def block_matrices(transformer: nn.Module) -> list[nn.Parameter]:
    """The attention and feed-forward matrices; modulation, embeddings, norms and biases are not among them."""
    return [p for n, p in transformer.named_parameters() if "blocks." in n and p.ndim == 2 and ".norm" not in n]


class Average:
    """Exponential moving average of parameters, over a shorter window at first."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay, self.steps = parameters, decay, 0
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.values, [p.detach() for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the live parameters; a second call undoes it."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            live = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(live)


class Clock:
    """The share of the training time that is used; a resumed run counts the time of earlier runs."""

    def __init__(self, minutes: float, warmup: float = 0.02) -> None:
        self.seconds, self.warmup, self.start, self.before = minutes * 60, warmup, time.monotonic(), 0.0

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.start

    @property
    def share(self) -> float:
        return min(1.0, self.elapsed / self.seconds)

    @property
    def done(self) -> bool:
        return self.elapsed >= self.seconds

    def rate(self, hold: float = 0.4) -> float:
        """Learning-rate factor: up, level for a while, then down along a cosine."""
        if self.share < self.warmup:
            return max(0.02, self.share / self.warmup)
        return 0.5 + 0.5 * math.cos(math.pi * max(0.0, (self.share - hold) / (1 - hold)))


def set_rate(optimisers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor


def save_checkpoint(
    path: Path, parameters: list[nn.Parameter], average: Average, optimisers: list[torch.optim.Optimizer], clock: Clock,
    step: int,
) -> None:  # fmt: skip
    """Save weights, average and optimiser state as safetensors."""
    tensors = {f"live.{i}": p.detach() for i, p in enumerate(parameters)}
    tensors |= {f"average.{i}": v for i, v in enumerate(average.values)}
    for o, optimiser in enumerate(optimisers):
        for i, state in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{o}.{i}.{k}": v.contiguous() for k, v in state.items() if isinstance(v, Tensor)}
    facts = {"step": str(step), "elapsed": str(clock.elapsed), "average_steps": str(average.steps)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete_file(path) as partial:
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, partial, facts)


@torch.no_grad()
def load_checkpoint(
    path: Path, parameters: list[nn.Parameter], average: Average, optimisers: list[torch.optim.Optimizer], clock: Clock,
) -> int:  # fmt: skip
    """Restore everything and return the step to continue from."""
    tensors = load_file(path, device=str(parameters[0].device))
    for i, parameter in enumerate(parameters):
        parameter.copy_(tensors[f"live.{i}"])
        average.values[i].copy_(tensors[f"average.{i}"])
    for o, optimiser in enumerate(optimisers):
        state: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, value in tensors.items():
            if name.startswith(f"optimiser.{o}."):
                _, _, i, key = name.split(".", 3)
                state[int(i)][key] = value
        optimiser.load_state_dict({"state": dict(state), "param_groups": optimiser.state_dict()["param_groups"]})
    with open(path, "rb") as file:
        facts = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    clock.before, average.steps = float(facts["elapsed"]), int(facts["average_steps"])
    return int(facts["step"])
