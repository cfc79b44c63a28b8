"""Who has an idempotency key: claims, and a ledger that is away or has lost its memory."""

import asyncio
from typing import Any

from instgenie.cluster.clerk import Clerk, name_of, order_key
from instgenie.cluster.ledger import KeyClaim, LocalLedger


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_of_two_claims_one_is_first() -> None:
    async def play() -> None:
        ledger = LocalLedger(60.0)
        one, other = (Clerk(ledger, seconds_to_place=0.0) for _ in range(2))
        mine = KeyClaim("name", "body", "request")
        first, second = await asyncio.gather(one.claim(mine), other.claim(mine))
        assert first.front == second.front == one.front
        one.placed(order_key("name", 3), 7)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await other.claim(mine)).worker == 7
        assert (await ledger.claim(KeyClaim("name", "another body"))).fingerprint == "body"
        assert await ledger.find("request") == await ledger.find("name")
        other.release("name")  # the other front has nothing to release
        await asyncio.sleep(0.01)
        assert await ledger.find("name")
        one.release("name")
        await asyncio.sleep(0.01)
        assert await ledger.find("name") is None
        assert await ledger.find("request") is None
        one.close()
        other.close()

    run(play())


def test_a_front_waits_until_the_first_one_has_chosen_a_worker_or_has_given_up() -> None:
    async def play() -> None:
        ledger = LocalLedger(60.0)
        one, other = Clerk(ledger), Clerk(ledger)
        for name in ("placed", "given up"):
            await one.claim(KeyClaim(name, "body"))
        waiting = [asyncio.create_task(other.claim(KeyClaim(name, "body"))) for name in ("placed", "given up")]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        one.placed(order_key("placed", 0), 7)
        one.release("given up")
        placed, given_up = await asyncio.gather(*waiting)
        assert (placed.front, placed.worker) == (one.front, 7)
        assert (given_up.front, given_up.worker) == (other.front, None)
        one.close()
        other.close()

    run(play())


def test_a_claim_is_forgotten_after_a_while() -> None:
    now = [0.0]
    ledger = LocalLedger(60.0, lambda: now[0])

    async def play() -> None:
        await ledger.claim(KeyClaim("a", "body", "request a"))
        now[0] = 30.0
        await ledger.claim(KeyClaim("b", "body"))
        now[0] = 50.0
        await ledger.note(KeyClaim("b", "body", worker=1))
        now[0] = 100.0
        assert await ledger.find("a") is None
        assert await ledger.find("request a") is None
        assert await ledger.find("b")

    run(play())


class ForgetfulLedger(LocalLedger):
    is_away = False

    async def claim(self, claim: KeyClaim) -> KeyClaim:
        if self.is_away:
            raise ConnectionError
        return await super().claim(claim)

    def restart(self) -> None:
        self._claims.clear()
        self._by_request.clear()


def test_a_ledger_that_is_away_stops_nothing_and_learns_all_claims_again() -> None:
    async def play() -> None:
        ledger = ForgetfulLedger(60.0)
        clerk = Clerk(ledger, seconds_between_renewals=0.01)
        ledger.is_away = True
        claim = await clerk.claim(KeyClaim("a", "body"))
        assert (claim.fingerprint, claim.worker) == ("body", None)
        ledger.is_away = False
        await clerk.claim(KeyClaim("b", "body"))
        clerk.placed(order_key("b", 0), 2)
        ledger.restart()
        await asyncio.sleep(0.1)
        found = [await ledger.find(name) for name in "ab"]
        assert [one and one.worker for one in found] == [None, 2]
        clerk.close()

    run(play())


def test_the_name_of_a_request_is_found_in_the_keys_of_its_edits() -> None:
    assert name_of(order_key("name", 12)) == "name"
