"""The strength of an edit that starts from colours under noise and leaves its strength open. Knows no schedule.

Both shares are of a model's own strength for edits of a whole picture."""

import math

UNPROMPTED = 0.85  # without a prompt, which alone gives the result a subject
CONTINUED = 0.95  # from the surroundings of the mask: with more, what is removed comes back; with less, a blur is left


def open_strength(wanted: float, steps: int) -> tuple[float, int]:
    """The strength, and the number of steps, that come nearest to a wanted strength below 1.

    A schedule leaves out whole steps. It begins with pure noise unless it leaves out one, so that few steps need a
    lower strength, and there are two at least, of which one is run."""
    steps = max(steps, 2)
    return min(round(wanted, 2), (1000 - math.ceil(1000 / steps)) / 1000), steps
