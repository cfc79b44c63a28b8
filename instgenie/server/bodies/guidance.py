"""What an answer says about guidance in parallel."""

from collections.abc import Sequence

from instgenie.cluster.orders import Facts
from instgenie.types import Notes


def guidance_notes(facts: Sequence[Facts]) -> Notes:
    found = [one.guidance for one in facts if one.guidance]
    if not found:
        return []
    notes = ["The two branches of its guidance were computed on two devices."]
    if repeated := sum(one.num_repeats for one in found):
        steps = "A step was" if repeated == 1 else f"{repeated} steps were"
        notes.append(f"{steps} repeated, because the process that computes the second branch had died.")
    if any(one.is_alone for one in found):
        notes.append("The last steps were computed on one device, because that process did not come back.")
    return notes
