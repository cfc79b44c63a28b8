"""How much a job's own activations change between its dense steps, from which it finds the next dense step. The numbers
are computed on the job's device and read a step later, behind work that is already started, so that no device idles."""

import torch
from torch import Tensor

from instgenie.jobs.activations import Activations

NUM_PLACES = 4  # places that are compared, spread over the pass
TOKEN_STRIDE = 8  # of which every eighth row
MIN_INTERVAL = 2  # steps from one dense step to the next: the change of the one is known before the other is chosen


class Change:
    """The relative change of a sample of activations between the last two steps that kept them."""

    def __init__(self) -> None:
        self.sample: Tensor | None = None
        self.step = 0  # that left the sample
        self.num_steps = 0  # between the last two samples
        self.relative: Tensor | None = None  # [1], in main memory
        self.ready: torch.cuda.Event | None = None

    def note(self, activations: Activations, step: int) -> None:
        """Compare what a step has just left with what was there before."""
        sample = take_sample(activations)
        if self.sample is not None:
            changed = (sample - self.sample).norm() / self.sample.norm().clamp(min=1e-6)
            self.relative, self.ready = to_host(changed)
            self.num_steps = step - self.step
        self.sample, self.step = sample, step

    @property
    def is_known(self) -> bool:
        return self.relative is not None

    def per_step(self) -> float:
        """The change per step between the last two samples."""
        assert self.relative is not None
        if self.ready:
            self.ready.synchronize()
        return float(self.relative) / self.num_steps


def take_sample(activations: Activations) -> Tensor:  # [values]
    places = range(0, activations.num_places, max(activations.num_places // NUM_PLACES, 1))
    return torch.cat([activations.rows[place][:, 0, :, ::TOKEN_STRIDE].float().flatten() for place in places])


def to_host(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A number [] as one in main memory [1], which is there when the event is over."""
    if value.device.type != "cuda":
        return value[None], None
    moved = torch.empty(1, dtype=value.dtype, pin_memory=True).copy_(value[None], non_blocking=True)
    return moved, torch.cuda.current_stream(value.device).record_event()


def next_dense_step(last: int, change_per_step: float, max_change: float) -> int:
    """The step at which the activations of the `last` dense step will have changed by `max_change`, if they go on as
    they did."""
    steps = int(max_change / max(change_per_step, 1e-9)) if change_per_step < max_change else 0
    return last + max(min(steps, 10**6), MIN_INTERVAL)
