"""Admission of requests: each takes its places in the cluster's queue before anything is decoded, and the bytes of its
decoded pictures before they are allocated. What does not fit is refused at once. Knows counts and bytes; knows no
picture.

One budget bounds the decoded pictures in this process: those of accepted edits, which are kept until the edits are
answered, and those that threads are decoding. Admission counts the kept bytes only; a decode waits for its turn until
the rest of the budget has room for it, or until no other decode runs, so that every admitted request is decoded.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.front import Place
from instgenie.errors import QueueFullError
from instgenie.server.errors import busy

P = ParamSpec("P")
Out = TypeVar("Out")


class ByteBudget:
    """Bytes of decoded pictures: kept ones, and those of running decodes."""

    def __init__(self, max_bytes: int, max_decodes: int) -> None:
        self.max_bytes = max_bytes
        self.max_decodes = max_decodes
        self.num_kept = 0
        self.num_decoding = 0
        self.num_decodes = 0
        self._turns: deque[tuple[int, asyncio.Future[None]]] = deque()  # decodes that wait, and their bytes

    def has_room_to_keep(self, num_bytes: int) -> bool:
        """True if the bytes fit, or if nothing else is kept: a single picture is never too large."""
        return not self.num_kept or self.num_kept + num_bytes <= self.max_bytes

    def keep(self, num_bytes: int) -> None:
        """Add kept bytes; a negative number releases them."""
        self.num_kept += num_bytes
        self._give_turns()

    async def turn(self, num_bytes: int) -> None:
        """Wait until a decode may start, in the order of arrival. `end` must follow."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.append((num_bytes, turn))
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(num_bytes)
            raise

    def end(self, num_bytes: int) -> None:
        self.num_decodes -= 1
        self.num_decoding -= num_bytes
        self._give_turns()

    def _give_turns(self) -> None:
        while self._turns:
            num_bytes, turn = self._turns[0]
            if not turn.done() and not self._may_decode(num_bytes):
                return
            self._turns.popleft()
            if not turn.done():  # else its request is gone
                self.num_decodes += 1
                self.num_decoding += num_bytes
                turn.set_result(None)

    def _may_decode(self, num_bytes: int) -> bool:
        has_room = self.num_kept + self.num_decoding + num_bytes <= self.max_bytes
        return not self.num_decodes or (has_room and self.num_decodes < self.max_decodes)


class Admission:
    def __init__(self, cluster: Cluster, max_bytes: int, num_decoders: int) -> None:
        self.cluster = cluster
        self.budget = ByteBudget(max_bytes, num_decoders)
        self.threads = ThreadPoolExecutor(num_decoders, thread_name_prefix="decode")

    def admit(self, num_edits: int, tenant: str = "") -> "Admitted":
        """Take places for the edits of a request. Raise 429 if there are none."""
        try:
            return Admitted(self, self.cluster.reserve(num_edits, tenant))
        except QueueFullError as full:
            message = f"The queue is full: {full.num_waiting} edits are waiting, {full.limit} are allowed, "
            if full.is_own:
                message = f"The queue has {full.num_waiting} edits of this API key, {full.limit} are allowed, "
            message += f"and the request has {num_edits}."
            raise busy(message, full.retry_after, "key_queue_full" if full.is_own else "queue_full") from None

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)


class Admitted:
    """The places and bytes of one request. They are held until the request is answered, refused or abandoned."""

    def __init__(self, admission: Admission, place: Place) -> None:
        self.admission = admission
        self.place = place
        self.num_bytes = 0

    def keep(self, num_bytes: int) -> None:
        """Take the bytes that the decoded pictures of the request need. Raise 429 if there is no room."""
        budget = self.admission.budget
        if not budget.has_room_to_keep(num_bytes):
            message = (
                f"The pictures of accepted edits take {budget.num_kept:,} of {budget.max_bytes:,} bytes: "
                f"there is no room for {num_bytes:,} more."
            )
            raise busy(message, self.admission.cluster.retry_after, "too_many_pictures")
        budget.keep(num_bytes)
        self.num_bytes += num_bytes

    async def decode(self, num_bytes: int, work: Callable[P, Out], *args: P.args, **kwargs: P.kwargs) -> Out:
        """Run `work`, which takes `num_bytes` at its peak, in a thread when it is its turn. A cancelled call gives up
        its turn; a thread that has begun keeps its bytes to its end."""
        budget, loop = self.admission.budget, asyncio.get_running_loop()
        await budget.turn(num_bytes)
        decoding = self.admission.threads.submit(work, *args, **kwargs)
        decoding.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(budget.end, num_bytes))
        return await asyncio.wrap_future(decoding)

    def hand_over(self) -> "Admitted":
        """Move everything to another owner, who outlives the request."""
        other = Admitted(self.admission, self.place)
        other.num_bytes, self.num_bytes = self.num_bytes, 0
        return other

    def leave(self) -> None:
        """Release everything; a second call does nothing."""
        self.place.release()
        self.admission.budget.keep(-self.num_bytes)
        self.num_bytes = 0
