"""Errors of processes that help workers with their steps."""


class StepLostError(Exception):
    """A part of a step does not come: whoever computed it has died, or could not. The step can be repeated."""


def described(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__
