"""Who has an idempotency key. A front claims a key before it runs the edits of a request; whoever claims the same key
later learns that it is taken, for which request, and which worker may have begun. Knows names only: a name is the
digest of a tenant and its key, so that tenants never meet.

`LocalLedger` serves the fronts of one process. Where fronts run on several machines, an actor holds a `LocalLedger` for
all of them (`cluster/ray/ledger.py`). A ledger that cannot be reached stops no edit: the front goes on without it, and
claims its keys again when the ledger is back.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

MAX_CLAIMS = 100_000  # the oldest are forgotten first


@dataclass(frozen=True)
class KeyClaim:
    """What is known of a key."""

    name: str
    fingerprint: str  # of the request: another request with the same key is refused
    request_id: str = ""  # digest of the tenant and the request's id: another name to find it by
    worker: int | None = None  # that runs its edits, or has run them; None: not yet known
    front: str = ""  # that runs them
    is_done: bool = False  # True once its answer is deposited with the worker


class Ledger(Protocol):
    """The calls are atomic: of two fronts that claim a key at once, one is first."""

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        """Take a key, or learn what is known of it: then the answer has the worker and the fingerprint of the first."""
        ...

    async def note(self, *claims: KeyClaim) -> None:
        """Correct what is known of keys, or renew it."""
        ...

    async def release(self, name: str, front: str) -> None:
        """Give a key back, if the front still has it: its request failed, and may be tried again."""
        ...

    async def find(self, name: str) -> KeyClaim | None:
        """The claim of this name, or the one whose request has this name."""
        ...


class LocalLedger:
    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A claim is forgotten `seconds` after it was last corrected."""
        self.seconds, self.clock = seconds, clock
        self._claims: OrderedDict[str, tuple[KeyClaim, float]] = OrderedDict()  # the oldest first
        self._by_request: dict[str, str] = {}

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        self._drop_old()
        known, _ = self._claims.get(claim.name, (None, 0.0))
        if known is None:
            self._put(claim)
        return known or claim

    async def note(self, *claims: KeyClaim) -> None:
        for claim in claims:
            known, _ = self._claims.get(claim.name, (claim, 0.0))
            if known.fingerprint == claim.fingerprint:
                self._put(replace(claim, request_id=known.request_id or claim.request_id))

    async def release(self, name: str, front: str) -> None:
        known, _ = self._claims.get(name, (None, 0.0))
        if known and known.front == front:
            del self._claims[name]
            self._by_request.pop(known.request_id, None)

    async def find(self, name: str) -> KeyClaim | None:
        self._drop_old()
        known = self._claims.get(name) or self._claims.get(self._by_request.get(name, ""))
        return known[0] if known else None

    def _put(self, claim: KeyClaim) -> None:
        self._claims[claim.name] = claim, self.clock() + self.seconds
        self._claims.move_to_end(claim.name)
        if claim.request_id:
            self._by_request[claim.request_id] = claim.name

    def _drop_old(self) -> None:
        while self._claims:
            name, (claim, until) = next(iter(self._claims.items()))
            if self.clock() < until and len(self._claims) <= MAX_CLAIMS:
                return
            del self._claims[name]
            self._by_request.pop(claim.request_id, None)
