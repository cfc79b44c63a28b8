"""The strength of an edit that starts from colours under noise and leaves its strength open. Knows no schedule.

Both shares are of a model's own strength for edits of a whole picture."""

import math

UNPROMPTED = 0.85  # without a prompt, which alone gives the result a subject
FROM_SURROUNDINGS = 0.95  # from what surrounds the mask: with more, a thing comes back; with less, a blur is left


def open_strength(wanted: float, steps: int) -> tuple[float, int]:
    """The strength, and the number of steps, that come nearest to a wanted strength. At least two steps are scheduled;
    with two, one runs."""
    steps = max(steps, 2)
    return visible_strength(round(wanted, 2), steps), steps


def visible_strength(wanted: float, steps: int) -> float:
    """The strength, or less if the edit would start from noise: a schedule leaves out whole steps, and it has to leave
    out one of these `steps`."""
    return min(wanted, (1000 - math.ceil(1000 / steps)) / 1000)
