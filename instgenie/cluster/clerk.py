"""A front's dealings with the ledger: it claims keys, corrects what is known of them, and claims them again from time
to time, so that a ledger that has lost its memory learns them anew. A ledger that does not answer stops no edit."""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from instgenie.cluster.ledger import KeyClaim, Ledger

SECONDS_TO_ANSWER = 2.0
SECONDS_BETWEEN_RENEWALS = 5.0
SECONDS_TO_PLACE = 10.0  # for another front to give the edits of a key to a worker; it may have died before that
SECONDS_BETWEEN_LOOKS = 0.1

Out = TypeVar("Out")

log = logging.getLogger(__name__)


class Clerk:
    def __init__(
        self,
        ledger: Ledger,
        seconds_between_renewals: float = SECONDS_BETWEEN_RENEWALS,
        seconds_to_place: float = SECONDS_TO_PLACE,
    ) -> None:
        self.ledger = ledger
        self.seconds_between_renewals, self.seconds_to_place = seconds_between_renewals, seconds_to_place
        self.front = uuid.uuid4().hex
        self.claims: dict[str, KeyClaim] = {}  # of this front, by name
        self._is_away = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        """Take a key. The answer is what is known of it, which may be of another front; the edits of that one are then
        with a worker, so that others can follow them there."""
        claim = replace(claim, front=self.front)
        end = time.monotonic() + self.seconds_to_place
        known = await self._ask(self.ledger.claim(claim), claim)
        while is_unplaced(known, claim) and time.monotonic() < end:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            known = await self._ask(self.ledger.claim(claim), claim)
        if known.fingerprint == claim.fingerprint:
            self.claims[claim.name] = known
            if self._renewing is None:
                self._renewing = asyncio.create_task(self._renew())
        return known

    async def find(self, name: str) -> KeyClaim | None:
        return await self._ask(self.ledger.find(name), None)

    def placed(self, key: str, worker: int) -> None:
        """Note the worker of an edit, whose key begins with the name of its request's."""
        claim = self.claims.get(name_of(key))
        if claim and (claim.worker, claim.front) != (worker, self.front):
            self._note(replace(claim, worker=worker, front=self.front, is_done=False))

    def finish(self, name: str) -> None:
        """Note that the answer is deposited with the worker."""
        if claim := self.claims.get(name):
            self._note(replace(claim, is_done=True))

    def release(self, name: str) -> None:
        """Give a key back: its request failed."""
        if self.claims.pop(name, None):
            self._later(self.ledger.release(name, self.front))

    def forget(self, name: str) -> None:
        """Renew a claim no more: the answer is no longer kept here."""
        self.claims.pop(name, None)

    def close(self) -> None:
        for task in (*self._tasks, *([self._renewing] if self._renewing else [])):
            task.cancel()

    def _note(self, claim: KeyClaim) -> None:
        self.claims[claim.name] = claim
        self._later(self.ledger.note(claim))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._ask(work, None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.seconds_between_renewals)
            if self.claims:
                await self._ask(self.ledger.note(*self.claims.values()), None)

    async def _ask(self, work: Coroutine[Any, Any, Out], otherwise: Out) -> Out:
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                answer = await work
        except Exception as error:
            if not self._is_away:
                log.warning("the ledger does not answer", extra={"reason": type(error).__name__})
            self._is_away = True
            return otherwise
        self._is_away = False
        return answer


def is_unplaced(known: KeyClaim, claim: KeyClaim) -> bool:
    """True if another front has claimed the key for the same request and has not yet chosen a worker."""
    return known.front != claim.front and known.fingerprint == claim.fingerprint and known.worker is None


def order_key(name: str, index: int) -> str:
    """The key of one edit of a request."""
    return f"{name}/{index}"


def name_of(key: str) -> str:
    return key.partition("/")[0]
