"""The message and the frames that send an entry to the process of its stage."""

import time
from collections.abc import Sequence
from typing import Protocol

from instgenie.cluster import wire
from instgenie.cluster.entries import ComputeMode, EditEntry, TemplateEntry
from instgenie.cluster.processes import Process
from instgenie.types import Box, Source


class Send(Protocol):
    def __call__(self, process: Process, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None: ...


def prepare_message(entry: EditEntry) -> tuple[wire.Prepare, list[wire.Frame]]:
    order = entry.order
    sizes = tuple(picture.shape[:2] for picture in order.references)
    own = order.wish, order.picture.shape[:2], order.trace, entry.request_id
    message = wire.Prepare(entry.id, entry.attempt, *own, sizes)
    return message, wire.picture_frames(order.picture, order.mask, *order.references, *order.control_images)


def denoising(
    entry: EditEntry,
    template: wire.TemplateHead | None,
    peers: tuple[str, ...] = (),
    finish_seconds: float = 0.0,
) -> wire.Denoising:
    assert entry.prepared is not None
    return wire.Denoising(
        id=entry.id,
        attempt=entry.attempt,
        job=entry.prepared.message.job,
        template=template,
        must_reuse=entry.mode is ComputeMode.CACHED,
        num_partials=entry.order.num_partials,
        may_own=entry.may_own,
        fails_dense=entry.must_not_run_dense,
        trace=entry.order.trace,
        request_id=entry.request_id,
        key=entry.order.key,
        peers=peers,
        seconds_left=entry.order.deadline - time.monotonic() - finish_seconds,
        priority=entry.order.priority,
        tenant=entry.order.tenant,
        number=entry.number,
        num_overtaken=entry.num_overtaken,
    )


def finish_message(
    entry: EditEntry, latents: wire.TensorHead, partial: int | None, frames: Sequence[wire.Frame]
) -> tuple[wire.Finish, list[wire.Frame]]:
    assert entry.prepared is not None
    order = entry.order
    source = (order.whole.source if order.whole else order.source) or Source()
    picture = order.whole.pixels if order.whole else order.picture if source.pixels is None else source.pixels
    message = wire.Finish(
        id=entry.id,
        attempt=entry.attempt,
        latents=latents,
        grid=entry.prepared.message.job.grid,
        size=order.size,
        seed=order.wish.seed,
        crop=edges(order.whole.box) if order.whole else None,
        feather=order.wish.feather,
        output_format=order.output_format,
        output_compression=order.output_compression,
        partial=partial,
        trace=order.trace,
        request_id=entry.request_id,
        num_channels=picture.shape[2],
        is_own=source.pixels is not None,
        profile=source.profile,
        exif=source.exif,
    )
    return message, [*frames, *wire.picture_frames(picture, order.mask)]


def edges(box: Box) -> tuple[int, int, int, int]:
    return box.rows.start, box.rows.stop, box.cols.start, box.cols.stop


def prepare_template_message(entry: TemplateEntry) -> tuple[wire.PrepareTemplate, list[wire.Frame]]:
    order = entry.order
    assert order.picture is not None
    message = wire.PrepareTemplate(
        entry.id, entry.attempt, order.steps, order.guidance, order.size, entry.is_urgent, entry.request_id
    )
    return message, wire.picture_frames(order.picture)


def register_message(
    entry: TemplateEntry, template: wire.TemplateHead, is_kept: bool, is_asked_for: bool
) -> tuple[wire.Register, list[wire.Frame]]:
    """Includes the picture if it is to be kept beside the activations."""
    assert entry.prepared is not None
    assert entry.order.picture is not None
    message = wire.Register(
        id=entry.id,
        attempt=entry.attempt,
        template=template,
        job=entry.prepared.message.job,
        is_urgent=entry.is_urgent,
        picture=entry.order.size if is_kept else None,
        request_id=entry.request_id,
        is_asked_for=is_asked_for,
        size=entry.order.size,
    )
    return message, [*entry.prepared.tensors, *(wire.picture_frames(entry.order.picture) if is_kept else ())]
