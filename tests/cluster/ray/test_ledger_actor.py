"""The ledger as an actor: two fronts ask it, it dies, and Ray starts it again without a memory."""

import asyncio
from contextlib import suppress

import ray
from helpers.clusters import Run
from helpers.rays import RayNodes
from ray.exceptions import RayError

from instgenie.cluster.clerk import Clerk, order_key
from instgenie.cluster.ledger import KeyClaim
from instgenie.cluster.ray.connect import join_ray
from instgenie.cluster.ray.ledger import RayLedger
from instgenie.cluster.ray.names import LEDGER


def test_fronts_claim_their_keys_again_from_a_ledger_that_was_restarted(rays: RayNodes, run: Run) -> None:
    join_ray(rays.address, "ledger")
    try:
        run(play())
    finally:
        ray.kill(ray.get_actor(LEDGER), no_restart=True)
        ray.shutdown()


async def play() -> None:
    one, other = (Clerk(RayLedger(60.0), seconds_between_renewals=0.2, seconds_to_place=0.0) for _ in range(2))
    claim = KeyClaim("name", "body", "request")
    await until_answered(one)
    first, second = await asyncio.gather(one.claim(claim), other.claim(claim))
    assert first.front == second.front
    assert first.front in (one.front, other.front)
    one.placed(order_key("name", 0), 3)
    ray.kill(ray.get_actor(LEDGER), no_restart=False)
    other.close()
    found = None
    async with asyncio.timeout(120):
        while not (found and found.worker == 3):
            found = await other.find("request")
            await asyncio.sleep(0.1)
    assert (found.name, found.fingerprint, found.front) == ("name", "body", one.front)
    one.close()


async def until_answered(clerk: Clerk) -> None:
    """Wait until the actor runs."""
    async with asyncio.timeout(120):
        while True:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(2):
                    await clerk.ledger.find("none")
                    return
