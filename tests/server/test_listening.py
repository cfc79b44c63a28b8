"""The listening socket, and the connections it accepts."""

import asyncio
import socket
from typing import Any

import httpx

from instgenie.server.config import read_config
from instgenie.server.serve import listen, make_server


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def test_small_answers_are_sent_without_delay() -> None:
    """Without TCP_NODELAY the body of an answer waits until the client has acknowledged its head, often 40 ms."""

    async def play() -> list[int]:
        config = read_config({"port": "0"}, {}).http
        with listen(config) as listener:
            server = make_server(answer, config)
            serving = asyncio.create_task(server.serve([listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(url)).text == "ok"
                accepted = [one.transport.get_extra_info("socket") for one in server.server_state.connections]
                delays = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted]
            server.should_exit = True
            await serving
        return delays

    assert asyncio.run(play()) == [1]
