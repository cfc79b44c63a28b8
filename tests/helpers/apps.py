"""The HTTP application in the process of the test, in front of a cluster that is not started."""

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx
from starlette.types import ASGIApp

from instgenie.cluster.cluster import Cluster
from instgenie.server.app import make_app
from instgenie.server.config import read_config
from instgenie.server.service import HttpService


def make_service(**options: Any) -> HttpService:
    config = read_config({"device": "cpu", "host_cache_gib": "0.1"} | options, {})
    return HttpService(config.http, Cluster(config.cluster))


def open_app(**options: Any) -> ASGIApp:
    """The application of a server with these options."""
    return make_app(make_service(**options), "0")


def ask(
    app: ASGIApp, method: str, path: str, headers: Iterable[tuple[str, str]] = (), url: str = "http://127.0.0.1:8000"
) -> httpx.Response:
    """Send a request without a body. Its `Host` is taken from the URL, unless the headers name another."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client:
            return await client.request(method, path, headers=list(headers))

    return asyncio.run(send())
