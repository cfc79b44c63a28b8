"""The ledger of a cluster on Ray: a detached actor that all fronts ask who has an idempotency key. It keeps nothing on
disk: when Ray has to start it again, the fronts claim their keys anew."""

from typing import Any

import msgspec
import ray

from instgenie.cluster.ledger import KeyClaim, LocalLedger
from instgenie.cluster.ray.names import LEDGER

NUM_CALLS = 1000  # that the actor takes at once


class LedgerActor:
    """Its methods wait for nothing, so that each of them is done before the next begins."""

    def __init__(self, seconds: float) -> None:
        self.ledger = LocalLedger(seconds)

    async def claim(self, claim: bytes) -> bytes:
        return encode(await self.ledger.claim(decode(claim)))

    async def note(self, claims: bytes) -> None:
        await self.ledger.note(*msgspec.json.decode(claims, type=list[KeyClaim]))

    async def release(self, name: str, front: str) -> None:
        await self.ledger.release(name, front)

    async def find(self, name: str) -> bytes | None:
        found = await self.ledger.find(name)
        return encode(found) if found else None


class RayLedger:
    """A front's way to the actor. Makes it if there is none."""

    def __init__(self, seconds: float) -> None:
        options = {"name": LEDGER, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1, "num_cpus": 0}
        self._actor: Any = ray.remote(LedgerActor).options(**options, max_concurrency=NUM_CALLS).remote(seconds)

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        return decode(await self._actor.claim.remote(encode(claim)))

    async def note(self, *claims: KeyClaim) -> None:
        await self._actor.note.remote(msgspec.json.encode(claims))

    async def release(self, name: str, front: str) -> None:
        await self._actor.release.remote(name, front)

    async def find(self, name: str) -> KeyClaim | None:
        found = await self._actor.find.remote(name)
        return decode(found) if found else None


def encode(claim: KeyClaim) -> bytes:
    return msgspec.json.encode(claim)


def decode(claim: bytes) -> KeyClaim:
    return msgspec.json.decode(claim, type=KeyClaim)
