"""Predicts how long a request still takes: all of its edits, from where each of them is to the last picture."""

import math
from collections.abc import Sequence

from instgenie.cluster.entries import EditEntry
from instgenie.scheduling.router import WorkerLoad


def seconds_left(group: Sequence[EditEntry], load: WorkerLoad) -> float | None:
    """Seconds until every edit of a request is answered; None as long as no step was measured. What the worker's load
    predicts is corrected by what is seen: the remaining steps never take less than at the pace of this request."""
    if not load.pace.is_measured:
        return None
    waiting = [entry for entry in group if entry.is_waiting]
    predicted = load.seconds_of_steps([entry.id for entry in group], wait=bool(waiting))
    prepare = load.side_seconds.get("prepare", 0.0)
    finish = load.side_seconds.get("finish", prepare)  # before the first one, decoding is taken to be like encoding
    preparing = prepare * sum(entry.stage == "prepare" for entry in group)
    finishing = finish * len(group)
    return preparing + max(predicted, observed_seconds(group, load.max_batch_size)) + finishing


def observed_seconds(group: Sequence[EditEntry], max_batch_size: int) -> float:
    """Seconds of the remaining steps at the pace of those edits of the request that take steps now: first theirs, then
    those of the edits that wait."""
    pace = max((entry.seconds_per_step for entry in group), default=0.0)
    num_running = max((entry.num_steps - entry.step for entry in group if entry.is_running), default=0)
    waiting = [entry.num_steps - entry.step for entry in group if entry.is_waiting]
    num_waiting = math.ceil(len(waiting) / max_batch_size) * max(waiting, default=0)
    return pace * (num_running + num_waiting)
