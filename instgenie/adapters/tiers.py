"""Where LoRAs are kept in memory: read from disk into main memory, copied from there to the device. The least recently
used go first; those that edits use are pinned and stay.

Loading happens in threads, so that an edit can take steps meanwhile. On a CPU main memory is the device's memory, and
there is one tier.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from typing import Literal

import torch

from instgenie.adapters.files import open_lora
from instgenie.adapters.fitting import Fitted, fit
from instgenie.adapters.layers import LayerTable
from instgenie.adapters.lora import Lora, read_lora
from instgenie.errors import LoraError
from instgenie.types import LoraUse

LoraTier = Literal["gpu", "host", "disk"]  # where a LoRA was found

NUM_THREADS = 2


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
    ) -> None:
        """Keep the layers that are wanted of each LoRA, in so many bytes. `wake` is called when one has come."""
        self.table, self.device, self.dtype, self.wants, self.wake = table, device, dtype, wants, wake
        self.limits: dict[LoraTier, int] = {"host": host_bytes, "gpu": gpu_bytes}
        self.kept: dict[LoraTier, OrderedDict[str, Lora]] = {"host": OrderedDict(), "gpu": OrderedDict()}
        self.pins: Counter[str] = Counter()  # by version
        self.loaded_seconds: list[tuple[LoraTier, int, float]] = []  # tier, bytes and seconds of loads not yet told
        self._loading: dict[str, Future[Lora]] = {}
        self._lock = RLock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "lora")

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
            tiers = [self._where(use.version) for use in uses]
            for use in uses:
                self.pins[use.version] += 1
            loads = [self._load(use) for use in uses]
        return LoraFetch(uses, loads, max(tiers, key=("gpu", "host", "disk").index, default=self.near))

    def warm(self, uses: Sequence[LoraUse]) -> None:
        """Begin to load LoRAs that an edit will ask for soon; none is pinned."""
        with self._lock:
            for use in uses:
                self._load(use)

    def release(self, fetch: LoraFetch) -> None:
        """Unpin the LoRAs of an edit that has ended."""
        with self._lock:
            for use in fetch.uses:
                self.pins[use.version] -= 1
            self.pins = +self.pins
            for tier in self.kept:
                self._make_room(tier)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _where(self, version: str) -> LoraTier:
        return next((tier for tier in ("gpu", "host") if version in self.kept[tier]), "disk")

    def _load(self, use: LoraUse) -> "Future[Lora]":
        near = self.kept[self.near].get(use.version)
        if near is not None:
            self.kept[self.near].move_to_end(use.version)
            done: Future[Lora] = Future()
            done.set_result(near)
            return done
        loading = self._loading.get(use.version)
        if loading is None:
            loading = self._loading[use.version] = self._threads.submit(self._bring, use)
            loading.add_done_callback(lambda _: self._arrived(use.version))
        return loading

    def _arrived(self, version: str) -> None:
        with self._lock:
            self._loading.pop(version, None)
        self.wake()

    def _bring(self, use: LoraUse) -> Lora:
        """Load a LoRA into the tier that steps read. Runs in a thread."""
        start = time.perf_counter()
        with self._lock:
            lora = self.kept["host"].get(use.version)
        tier: LoraTier = "disk" if lora is None else "host"
        lora = self._read(use) if lora is None else lora
        if self.near == "gpu":
            self._keep("host", use.version, lora)
            lora = copy_to(lora, self.device)
        self._keep(self.near, use.version, lora)
        len(lora.layers)  # views are made here, and not between two steps
        self.loaded_seconds.append((tier, lora.num_bytes, time.perf_counter() - start))
        return lora

    def _read(self, use: LoraUse) -> Lora:
        try:
            file = open_lora(Path(use.path))
            fitted = [one for one in fit(file.header, self.table, file.settings) if self.wants(one)]
            return read_lora(file, fitted, self.dtype, pins=self.near == "gpu")
        except LoraError as error:
            raise LoraError(f"the LoRA {use.name!r} cannot be used: {error}") from None

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


def copy_to(lora: Lora, device: torch.device) -> Lora:
    """Copy a LoRA to a GPU in a stream of its own, and wait for that in this thread alone. Its memory belongs to the
    stream that computes, so that it can be reused in the order of that stream."""
    memory = torch.empty(lora.memory.shape, dtype=lora.memory.dtype, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        memory.copy_(lora.memory, non_blocking=True)
    stream.synchronize()
    return Lora(memory, lora.pieces)
