"""Records the steps of a server and the jobs in each, from the events that its engine page shows."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from instgenie.bench.served import ServedJob, ServedStep

Seen = Mapping[str, Any]  # a step or a stay of a job in a batch, as the server tells it


class StepRecorder:
    def __init__(self) -> None:
        self.num_workers = self.max_batch_size = 0
        self._steps: dict[tuple[int, float], Seen] = {}  # by worker and end
        self._stays: dict[tuple[int, str, float], Seen] = {}  # by worker, job and begin

    @asynccontextmanager
    async def following(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """Record while the block runs. Steps before it are forgotten."""
        is_following = asyncio.Event()
        task = asyncio.create_task(self._follow(client, is_following))
        await is_following.wait()
        try:
            yield
            await asyncio.sleep(1)  # for the snapshot with the last steps
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _follow(self, client: httpx.AsyncClient, is_following: asyncio.Event) -> None:
        async with client.stream("GET", "/engine/events") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    snapshot = json.loads(line.removeprefix("data: "))
                    if is_following.is_set():
                        self.take(snapshot)
                    else:
                        self._note_shape(snapshot)
                        is_following.set()

    def _note_shape(self, snapshot: Seen) -> None:
        self.num_workers, self.max_batch_size = len(snapshot["workers"]), snapshot["max_batch_size"]

    def take(self, snapshot: Seen) -> None:
        """Take the steps and stays of a snapshot; a stay that has ended meanwhile replaces what was known of it."""
        self._note_shape(snapshot)
        for worker in snapshot["workers"]:
            index = worker["index"]
            self._steps |= {(index, step["ended"]): step for step in worker["steps"]}
            self._stays |= {(index, stay["job"], stay["joined"]): stay for stay in worker["bars"]}

    def steps(self) -> list[ServedStep]:
        """The recorded steps whose jobs are known, in their order."""
        found = []
        for worker in sorted({worker for worker, _ in self._steps}):
            stays = [stay for (index, _, _), stay in self._stays.items() if index == worker]
            steps = [step for (index, _), step in sorted(self._steps.items()) if index == worker]
            found += list(join(steps, stays))
        return found


def join(steps: Iterable[Seen], stays: Iterable[Seen]) -> Iterable[ServedStep]:
    """Find the jobs of each step: those that were in the batch when it ended."""
    waiting = sorted(stays, key=lambda stay: stay["joined"], reverse=True)
    current: list[Seen] = []
    num_taken: Counter[float] = Counter()  # steps of each stay, by its begin and job
    for step in steps:
        while waiting and waiting[-1]["joined"] <= step["ended"]:
            current.append(waiting.pop())
        current = [stay for stay in current if stay["left"] is None or stay["left"] >= step["ended"]]
        if len(current) != step["batch_size"]:
            continue
        jobs = []
        for stay in current:
            taken = stay["step"] + num_taken[id(stay)]
            num_taken[id(stay)] += 1
            sizes = stay["num_tokens"], stay["num_masked_tokens"]
            jobs.append(ServedJob(*sizes, taken, stay["num_steps"], stay["is_cached"]))
        yield ServedStep(step["seconds"], step["between"], tuple(jobs))
