"""Messages and pixels as bytes, and back."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from instgenie.cluster.wire.commands import Command, Denoising
from instgenie.cluster.wire.heads import Frame, Message
from instgenie.cluster.wire.reports import Report
from instgenie.types import OwnPixels, PixelMask

AnyMessage: TypeAlias = Command | Report

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(head: Frame) -> AnyMessage:
    message: AnyMessage = _decoder.decode(head)
    return message


def picture_frames(*arrays: OwnPixels | PixelMask) -> list[Frame]:
    return [np.ascontiguousarray(array).data.cast("B") for array in arrays]


def read_picture(frame: Frame, size: tuple[int, int], num_channels: int = 3) -> OwnPixels:
    return np.frombuffer(frame, np.uint8).reshape(*size, num_channels)


def read_mask(frame: Frame, size: tuple[int, int]) -> PixelMask:
    return np.frombuffer(frame, np.bool_).reshape(size)


def split_frames(frames: Sequence[Frame], jobs: Sequence[Denoising]) -> list[Sequence[Frame]]:
    """Divide the frames of a `Denoise` message among its jobs."""
    parts, start = [], 0
    for given in jobs:
        end = start + len(given.job.tensors)
        parts.append(frames[start:end])
        start = end
    return parts
