"""Messages between a worker and its companion, the process that computes the second branch of its edits. Frames are the
bytes of tensors."""

from typing import TypeAlias

import msgspec
from msgspec import Struct

from instgenie.cluster.wire.heads import Frame, JobHead, Message, TensorHead

# from the worker


class Greet(Message, frozen=True):
    """The worker has begun, or has lost the companion: forget what others have opened. `Greeted` answers it."""


class OpenBranch(Message, frozen=True):
    """A job will ask for predictions of its second branch. Frames: those of the job with that branch alone, then the
    latents at the step `kept`, if there is one."""

    id: str
    job: JobHead
    has_own: bool  # it reads what its own dense steps leave behind
    kept: int | None = None  # the latest of these, which is to be computed again first; None: there is none yet
    latents: TensorHead | None = None  # at that step


class BranchStep(Struct, frozen=True):
    id: str
    step: int
    is_dense: bool
    latents: TensorHead


class AskBranches(Message, frozen=True):
    """Predict a step. Frames: the latents of each job. `BranchesReady` answers it, or `BranchesRefused`."""

    ticket: int
    steps: tuple[BranchStep, ...]


class CloseBranch(Message, frozen=True):
    """A job has ended."""

    id: str


# from the companion


class Greeted(Message, frozen=True):
    pass


class BranchesReady(Message, frozen=True):
    """Frames: a prediction for each job, in the order in which they were asked for."""

    ticket: int
    tensors: tuple[TensorHead, ...]


class BranchesRefused(Message, frozen=True):
    """A job is not open here, or its step has failed."""

    ticket: int
    message: str


GuidanceMessage: TypeAlias = Greet | OpenBranch | AskBranches | CloseBranch | Greeted | BranchesReady | BranchesRefused

GREETING = "greeting"  # the key of the answer to a greeting

_decoder = msgspec.msgpack.Decoder(GuidanceMessage)


def decode_guidance(head: Frame) -> GuidanceMessage:
    message: GuidanceMessage = _decoder.decode(head)
    return message


def read_guidance(head: Frame) -> tuple[str | int | None, GuidanceMessage]:
    """An answer, and the key of the question."""
    message = decode_guidance(head)
    match message:
        case Greeted():
            return GREETING, message
        case BranchesReady(ticket=ticket) | BranchesRefused(ticket=ticket):
            return ticket, message
    return None, message
