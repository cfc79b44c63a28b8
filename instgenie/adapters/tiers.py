"""Where LoRAs are kept in memory: read from disk into main memory, copied from there to the device. The least recently
used go first; those that edits use are pinned and stay.

Loading happens in threads, so that an edit can take steps meanwhile. On a CPU main memory is the device's memory, and
there is one tier.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from typing import Literal, get_args

import torch
from torch import Tensor

from instgenie.adapters.files import locate
from instgenie.adapters.fitting import Fitted, fit
from instgenie.adapters.header import open_weights, parse_header, read_raw
from instgenie.adapters.layers import LayerTable
from instgenie.adapters.lora import Lora, check_finite, read_lora
from instgenie.adapters.plan import LoraPlan, make_plan
from instgenie.adapters.remote import LoraDisk
from instgenie.errors import LoraError
from instgenie.machine.pages import lock_pages
from instgenie.types import LoraUse

LoraTier = Literal["gpu", "host", "disk", "remote"]  # where a LoRA was found

DISK_BYTES = 20 * 2**30  # for copies of remote LoRAs
NUM_THREADS = 2
NUM_READERS = 4  # threads that wait for the disk
MAX_PLANS = 32  # of files with other layouts
PIECE_BYTES = 16 * 2**20  # that are copied to a GPU at once
NOTHING = Lora(torch.empty(0), ())  # a LoRA that patches no layer


class LoraFetch:
    """The LoRAs of one edit on their way to the device."""

    def __init__(self, uses: Sequence[LoraUse], loads: "Sequence[Future[Lora]]", tier: LoraTier) -> None:
        self.uses = tuple(uses)
        self.loads = loads
        self.tier = tier  # the slowest that one of them was found in

    @property
    def is_done(self) -> bool:
        return all(load.done() for load in self.loads)

    def result(self) -> list[tuple[Lora, float]]:
        """The LoRAs with their scales, on the device; waits for them. Raises the LoraError of one that cannot be
        loaded."""
        return [(load.result(), use.scale) for use, load in zip(self.uses, self.loads, strict=True)]

    @property
    def names(self) -> tuple[tuple[str, float], ...]:
        return tuple((use.version, use.scale) for use in self.uses)


class LoraTiers:
    def __init__(
        self,
        table: LayerTable,
        device: torch.device,
        dtype: torch.dtype,
        host_bytes: int,
        gpu_bytes: int = 0,
        wants: Callable[[Fitted], bool] = lambda fitted: True,
        wake: Callable[[], None] = lambda: None,
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        """Keep the layers that are wanted of each LoRA, in so many bytes, and copies of remote ones on the disk. `wake`
        is called when one has come."""
        self.disk = LoraDisk(disk_bytes)
        self.table, self.device, self.dtype, self.wants, self.wake = table, device, dtype, wants, wake
        self.limits: dict[LoraTier, int] = {"host": host_bytes, "gpu": gpu_bytes}
        self.kept: dict[LoraTier, OrderedDict[str, Lora]] = {"gpu": OrderedDict(), "host": OrderedDict()}
        self.pins: Counter[str] = Counter()  # by version
        self.loaded_seconds: list[tuple[LoraTier, int, float]] = []  # tier, bytes and seconds of loads not yet told
        self._loading: dict[str, tuple[LoraTier, Future[Lora]]] = {}  # from which tier, by version
        self._lock = RLock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "lora")
        self._readers = ThreadPoolExecutor(NUM_READERS, "lora-reader")
        self._plans: OrderedDict[tuple[str, str], LoraPlan] = OrderedDict()
        self._copiers = threading.local()

    @property
    def near(self) -> LoraTier:
        """The tier that steps read."""
        return "gpu" if self.device.type == "cuda" else "host"

    def num_bytes(self) -> dict[LoraTier, int]:
        with self._lock:
            return {tier: sum(lora.num_bytes for lora in kept.values()) for tier, kept in self.kept.items()}

    def versions(self) -> tuple[str, ...]:
        """Of the LoRAs that are near the steps."""
        with self._lock:
            return tuple(self.kept[self.near])

    def fetch(self, uses: Sequence[LoraUse]) -> LoraFetch:
        """Pin LoRAs, and begin to load those that are not near. Never waits."""
        with self._lock:
            tiers = [self._where(use) for use in uses]
            for use in uses:
                self.pins[use.version] += 1
            loads = [self._load(use, tier) for use, tier in zip(uses, tiers, strict=True)]
        return LoraFetch(uses, loads, max(tiers, key=get_args(LoraTier).index, default=self.near))

    def warm(self, uses: Sequence[LoraUse]) -> None:
        """Begin to load LoRAs that an edit will ask for soon; none is pinned."""
        with self._lock:
            for use in uses:
                self._load(use, self._where(use))

    def release(self, fetch: LoraFetch) -> None:
        """Unpin the LoRAs of an edit that has ended."""
        with self._lock:
            for use in fetch.uses:
                self.pins[use.version] -= 1
            self.pins = +self.pins
            for tier in self.kept:
                self._make_room(tier)

    def close(self) -> None:
        for threads in (self._threads, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _where(self, use: LoraUse) -> LoraTier:
        """The fastest tier that has a LoRA. While one loads, it is the tier that it comes from: others on the way may
        have a copy already."""
        if use.version in self._loading and use.version not in self.kept[self.near]:
            return self._loading[use.version][0]
        for tier, kept in self.kept.items():
            if use.version in kept:
                return tier
        return "disk" if self.disk.has(use) else "remote"

    def _load(self, use: LoraUse, tier: LoraTier) -> "Future[Lora]":
        """Begin to load a LoRA from the tier where it is, unless it is near or loads already."""
        near = self.kept[self.near].get(use.version)
        if near is not None:
            self.kept[self.near].move_to_end(use.version)
            done: Future[Lora] = Future()
            done.set_result(near)
            return done
        if use.version in self._loading:
            return self._loading[use.version][1]
        loading = self._threads.submit(self._bring, use, tier, self.kept["host"].get(use.version))
        self._loading[use.version] = tier, loading
        loading.add_done_callback(lambda _: self._arrived(use.version))
        return loading

    def _arrived(self, version: str) -> None:
        with self._lock:
            self._loading.pop(version, None)
        self.wake()

    def _bring(self, use: LoraUse, tier: LoraTier, lora: Lora | None) -> Lora:
        """Load a LoRA from a tier into the one that steps read; from main memory it is given. Runs in a thread."""
        start = time.perf_counter()
        is_new = lora is None
        try:
            lora = lora or (self._read(self.disk.bring(use)) if self._needs_file(use) else NOTHING)
            near, is_finite = self._bring_near(lora)
            if is_new and not is_finite:
                check_finite(locate(Path(use.path))[0])
        except LoraError as error:
            raise type(error)(f"the LoRA {use.name!r} cannot be used: {error}") from None
        if self.near == "gpu":
            self._keep("host", use.version, lora)
        self._keep(self.near, use.version, near)
        for low in near.layers.values():
            low.entry  # noqa: B018, views are made and found here, and not between two steps
        self.loaded_seconds.append((tier, near.num_bytes, time.perf_counter() - start))
        return near

    def _bring_near(self, lora: Lora) -> tuple[Lora, bool]:
        """A LoRA on the device in the dtype of the model, and whether the sum of its numbers is finite. If it is, all
        of them are: no test of each is as quick."""
        if self.near == "gpu":
            return self._copier.copy(lora, self.dtype)
        near = lora.to(self.dtype)
        return near, bool(near.memory.sum().isfinite())

    def _needs_file(self, use: LoraUse) -> bool:
        """Return whether any layer of a LoRA is wanted here. Of a remote one the header alone says it."""
        if self.disk.has(use):
            return True
        return any(map(self.wants, fit(self.disk.look(use).header, self.table, {})))

    def _read(self, path: Path) -> Lora:
        """Read a LoRA into main memory. Where its tensors go is found once for all files of a layout."""
        path, settings = locate(path)
        with open_weights(path) as file:
            raw = read_raw(path, file)
            layout = raw.layout, repr(sorted(settings.items()))
            plan = self._plans.get(layout)
            if plan is None:
                header = parse_header(raw)
                plan = make_plan(header, [one for one in fit(header, self.table, settings) if self.wants(one)])
            with self._lock:
                self._plans[layout] = plan
                self._plans.move_to_end(layout)
                while len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
            return read_lora(file.fileno(), plan, self._readers.map)

    @property
    def _copier(self) -> "Copier":
        """Of this thread."""
        if not hasattr(self._copiers, "own"):
            self._copiers.own = Copier(self.device)
        own: Copier = self._copiers.own
        return own

    def _keep(self, tier: LoraTier, version: str, lora: Lora) -> None:
        with self._lock:
            self.kept[tier][version] = lora
            self.kept[tier].move_to_end(version)
            self._make_room(tier)

    def _make_room(self, tier: LoraTier) -> None:
        """Drop the least recently used that no edit has pinned, until the rest fits. Pinned ones may be more than that:
        what running edits use cannot go. On the way to a GPU, none needs its copy in main memory."""
        kept = self.kept[tier]
        used = sum(lora.num_bytes for lora in kept.values())
        for version in list(kept):
            if used <= self.limits[tier]:
                return
            if not (tier == self.near and self.pins[version]):
                used -= kept.pop(version).num_bytes


class Copier:
    """Copies LoRAs to a GPU in a stream of its own, through two page-locked buffers: to lock the pages of every LoRA
    would take longer than to copy it, and the launches of steps would wait for that."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        with torch.cuda.device(device):  # a thread begins with the first one
            self.buffers = [lock_pages(PIECE_BYTES) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in self.buffers]

    def copy(self, lora: Lora, dtype: torch.dtype) -> tuple[Lora, bool]:
        """A copy in a dtype, and whether the sum of its numbers is finite. Waits in this thread alone. The memory
        belongs to the stream that computes, so that it can be reused in the order of that stream."""
        memory = torch.empty(lora.memory.shape, dtype=dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            is_finite = self._copy(lora.memory, memory)
        finally:
            self.stream.synchronize()  # also after an error: nothing writes to memory that is given out again
        return Lora(memory, lora.pieces), is_finite

    def _copy(self, source: Tensor, memory: Tensor) -> bool:
        num_each = PIECE_BYTES // source.itemsize
        sums = []
        for number, (piece, target) in enumerate(zip(source.split(num_each), memory.split(num_each), strict=True)):
            buffer, copied = self.buffers[number % 2].view(piece.dtype)[: len(piece)], self.copied[number % 2]
            copied.synchronize()
            buffer.copy_(piece)
            with torch.cuda.stream(self.stream):
                target.copy_(buffer.to(self.device, non_blocking=True))
                copied.record(self.stream)
                sums.append(target.sum())
        with torch.cuda.stream(self.stream):
            return bool(torch.stack(sums).isfinite().all())
