"""Messages between workers and the processes of ControlNets, which workers share. Frames are the bytes of tensors."""

from typing import TypeAlias

import msgspec
from msgspec import Struct

from instgenie.cluster.wire.heads import Frame, Message, TensorHead
from instgenie.types import ControlUse

# from workers


class OpenControls(Message, frozen=True):
    """A job will ask for residuals: load its ControlNets, and keep what they read at every step. Frames: hints, one per
    ControlNet, then per branch its text, then per branch its pooled text. `ControlsOpened` answers it."""

    job: str
    uses: tuple[ControlUse, ...]
    size: tuple[int, int]  # (height, width) of the images
    num_branches: int
    tensors: tuple[TensorHead, ...]


class StepHead(Struct, frozen=True):
    """What ControlNets read of a job at one step."""

    job: str
    timestep: float
    guidance: float
    scales: tuple[float, ...]  # one per ControlNet; 0: it does not guide this step
    sample: TensorHead
    rows: TensorHead | None  # indices of the tokens whose residuals are needed; None: all


class AskResiduals(Message, frozen=True):
    """Compute the residuals of a step. Frames: per job its sample, then its rows, if it has any. `ResidualsReady`
    answers it, or `ResidualsRefused`."""

    ticket: int
    steps: tuple[StepHead, ...]
    shares: bool = True  # answer in shared memory; False: in frames


class CloseControls(Message, frozen=True):
    """A job has ended."""

    job: str


# from processes of ControlNets


class ControlsOpened(Message, frozen=True):
    job: str


class ControlsRefused(Message, frozen=True):
    """The ControlNets of a job cannot be loaded."""

    job: str
    message: str


class ResidualsReady(Message, frozen=True):
    """Residuals lie one behind the other in shared memory, at multiples of 64 bytes, or in frames."""

    ticket: int
    tensors: tuple[tuple[TensorHead, ...], ...]  # per job and place
    memory: str  # path of the shared memory; empty: frames
    num_bytes: int  # of the shared memory
    started: float  # of `time.monotonic`, which the processes of a machine share
    ended: float
    num_jobs: int  # that shared the passes, of all workers


class ResidualsRefused(Message, frozen=True):
    """A job is not open here, or its ControlNets have failed."""

    ticket: int
    message: str


ControlMessage: TypeAlias = (
    OpenControls | AskResiduals | CloseControls | ControlsOpened | ControlsRefused | ResidualsReady | ResidualsRefused
)

_decoder = msgspec.msgpack.Decoder(ControlMessage)


def read_control(head: Frame) -> tuple[str | int | None, ControlMessage]:
    """An answer, and the key of the question."""
    message = decode_control(head)
    match message:
        case ControlsOpened(job) | ControlsRefused(job, _):
            return job, message
        case ResidualsReady(ticket=ticket) | ResidualsRefused(ticket=ticket):
            return ticket, message
    return None, message


def decode_control(head: Frame) -> ControlMessage:
    message: ControlMessage = _decoder.decode(head)
    return message
