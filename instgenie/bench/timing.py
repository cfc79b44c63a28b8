"""A system that edits are timed through, and the loop that times several systems in turn. Knows no model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instgenie.jobs.activations import CacheDtype, Kind
from instgenie.types import Edit, PlanPolicy, TierName


@dataclass(frozen=True)
class Timing:
    """Seconds of one run."""

    edit: float  # up to the final latents, with text encoders and autoencoder
    denoise: float  # the steps alone


@dataclass(frozen=True)
class Caching:
    """How a system keeps and loads activations."""

    kind: Kind
    cache_dtype: CacheDtype
    tier: TierName
    policy: PlanPolicy


@dataclass(frozen=True)
class System:
    name: str
    caching: Caching | None  # None: it computes every token
    run: Callable[[Sequence[Edit]], Timing]

    @property
    def sees_masks(self) -> bool:
        return self.caching is not None


def measure(
    systems: Sequence[System], edits: Sequence[Edit], repeats: int, on_run: Callable[[], None]
) -> dict[System, list[Timing]]:
    """Run every system `repeats` times, in alternating order."""
    timings: dict[System, list[Timing]] = {system: [] for system in systems}
    order = list(systems)
    for _ in range(repeats):
        for system in order:
            timings[system].append(system.run(edits))
            on_run()
        order.reverse()
    return timings
