"""The strength of an edit that starts from colours under noise and leaves its strength open. Knows no schedule."""

import math

UNPROMPTED = 0.85  # share of a strength that is left without a subject, which a prompt alone gives


def open_strength(own: float, steps: int, has_subject: bool) -> tuple[float, int]:
    """The strength, and the number of steps, from a model's own strength for edits of a whole picture.

    A schedule leaves out whole steps. It begins with pure noise unless it leaves out one, so that few steps need a
    lower strength, and there are two at least, of which one is run."""
    steps = max(steps, 2)
    wanted = own if has_subject else round(UNPROMPTED * own, 2)
    return min(wanted, (1000 - math.ceil(1000 / steps)) / 1000), steps
