"""What an edit asks of the scheduler besides its work, and how the scheduler sees a job. Plain numbers: no clock."""

import math
from typing import NamedTuple

from instgenie.cost.table import Price

NO_DEADLINE = math.inf


class Terms(NamedTuple):
    deadline: float = NO_DEADLINE  # time at which its last step should be taken, on the clock of whoever asks
    priority: int = 0  # lower goes first
    tenant: str = ""
    number: int = 0  # older edits have lower numbers, whichever front took them


NO_TERMS = Terms()


class PricedJob(NamedTuple):
    """A job as the scheduler sees it, running or waiting."""

    price: Price  # mean over the remaining steps
    num_steps: int  # remaining
    terms: Terms = NO_TERMS
    num_overtaken: int = 0  # younger jobs of its tenant that joined before it
    num_taken: int = 0  # steps

    @property
    def has_deadline(self) -> bool:
        return self.terms.deadline != NO_DEADLINE


class Standing(NamedTuple):
    """An edit that wants to go next, at whatever stage it waits."""

    terms: Terms
    seconds: float  # that its remaining steps take if it is alone
    num_overtaken: int = 0  # younger edits of its tenant that went before it
    work: float = 0.0  # seconds of its worker that they take if it shares every step with others
