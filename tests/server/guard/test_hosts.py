"""Foreign hosts and foreign web pages: a server without a key answers neither, on any path, with any method."""

import asyncio
from typing import Any

import pytest
from helpers.apps import ask, open_app
from starlette.types import ASGIApp

from instgenie.errors import ConfigError
from instgenie.server.config import read_config

OWN = "http://127.0.0.1:8000"
EVERYWHERE = [
    ("GET", "/v1/models"), ("GET", "/v1/templates"), ("POST", "/v1/templates"), ("DELETE", "/v1/templates/x"),
    ("POST", "/v1/images/edits"), ("POST", "/v1/images/generations"), ("GET", "/engine/events"), ("GET", "/metrics"),
    ("GET", "/page/facts"), ("GET", "/openapi.json"), ("GET", "/"), ("GET", "/engine"), ("GET", "/static/edit.js"),
    ("GET", "/health"), ("GET", "/ready"), ("OPTIONS", "/v1/images/edits"), ("GET", "/nowhere"),
]  # fmt: skip


@pytest.fixture(scope="module")
def app() -> ASGIApp:
    return open_app()


def refusal(app: ASGIApp, method: str = "GET", path: str = "/v1/models", **headers: str) -> Any:
    """The code of the refusal; None if the request is answered."""
    answer = ask(app, method, path, headers.items())
    return answer.json()["error"]["code"] if answer.status_code == 403 else None


@pytest.mark.parametrize(("method", "path"), EVERYWHERE)
def test_a_page_that_took_over_a_name_is_refused_everywhere(app: ASGIApp, method: str, path: str) -> None:
    """The page's own host name points to this server, so its origin is the request's host."""
    assert refusal(app, method, path, host="evil.example:8000", origin="http://evil.example:8000") == "host_not_allowed"
    assert refusal(app, method, path, host="evil.example") == "host_not_allowed"


@pytest.mark.parametrize(("method", "path"), EVERYWHERE)
def test_a_foreign_page_is_refused_everywhere(app: ASGIApp, method: str, path: str) -> None:
    assert refusal(app, method, path, origin="https://evil.example") == "origin_not_allowed"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil-localhost", "localhost@evil.example",
        "10.1.2.3", "[::2]", "0.0.0.0", "0x7f.1", "2130706433", "instgenie", "", ":8000", "localhost:http", "a b",
        "localhost, evil.example", "localhost/", "[127.0.0.1", "localhost:8000:8000",
    ],
)  # fmt: skip
def test_hosts_that_are_not_this_server(app: ASGIApp, host: str) -> None:
    assert refusal(app, host=host) == "host_not_allowed"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.:9", "app.localhost:1", "127.0.0.1", "127.0.0.2:80", "[::1]", "[::1]:8000"],
)
def test_loopback_names(app: ASGIApp, host: str) -> None:
    assert refusal(app, host=host) is None


@pytest.mark.parametrize("origin", ["http://127.0.0.1:9000", "https://127.0.0.1", "http://localhost:8000", "null", ""])
def test_another_origin_on_this_machine_is_foreign(app: ASGIApp, origin: str) -> None:
    assert refusal(app, origin=origin) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8000", OWN),
        ("localhost", "http://localhost"),
        ("localhost", "https://localhost"),  # behind a proxy that speaks TLS
        ("localhost:80", "http://localhost"),
        ("localhost", "https://localhost:443"),
        ("LocalHost:1", "http://localhost:1"),
    ],
)
def test_the_servers_own_pages_may_call_it(app: ASGIApp, host: str, origin: str) -> None:
    assert refusal(app, host=host, origin=origin) is None


def test_the_refusal_says_which_option_helps(app: ASGIApp) -> None:
    answer = ask(app, "GET", "/health", [("host", "e" * 500 + ".example")])
    assert answer.json()["error"]["type"] == "permission_error"
    assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert len(answer.text) < 500
    assert answer.headers["x-should-retry"] == "false"
    assert "--allowed-origins" in ask(app, "GET", "/", [("origin", "http://a.example")]).json()["error"]["message"]


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_a_server_on_all_addresses_is_reached_by_any_address_but_by_no_foreign_name(bound: str) -> None:
    """The address may be a container's, its host's or a pod's."""
    app = open_app(host=bound)
    for host in ("192.168.1.7:8000", "10.42.0.9:8000", "[2001:db8::1]:8000", "0.0.0.0:8000", "localhost:8000"):
        assert refusal(app, host=host) is None, host
    assert refusal(app, host="instgenie.default.svc:8000") == "host_not_allowed"
    assert refusal(app, host="10.0.0.1:8000", origin="http://10.0.0.2:8000") == "origin_not_allowed"


def test_a_server_on_one_address_is_reached_by_it() -> None:
    app = open_app(host="10.1.2.3")
    assert refusal(app, host="10.1.2.3:8000") is None
    assert refusal(app, host="10.1.2.4:8000") == "host_not_allowed"
    assert refusal(open_app(host="gpu-box"), host="GPU-box:8000") is None


def test_names_that_are_allowed() -> None:
    app = open_app(allowed_hosts=["instgenie", "*.svc.cluster.local"])
    for host in ("instgenie:8000", "Instgenie", "a.b.svc.cluster.local", "localhost"):
        assert refusal(app, host=host) is None, host
        assert refusal(app, host=host, origin=f"http://{host}") is None, host
    for host in ("instgenie.evil.example", "svc.cluster.local", "evilsvc.cluster.local"):
        assert refusal(app, host=host) == "host_not_allowed", host
    assert refusal(open_app(allowed_hosts=["*"]), host="anything.example") is None
    assert refusal(open_app(allowed_hosts=["*"]), origin="http://evil.example") == "origin_not_allowed"


@pytest.mark.parametrize("name", ["https://a.example", "a.example:80", "a/b", "*.*", "a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="a host name without scheme and port"):
        read_config({"allowed_hosts": [name]}, {})


def test_a_key_guards_a_server_against_foreign_names() -> None:
    """Whatever name a client uses, it needs the key; a name is still refused if others are given."""
    key = {"authorization": "Bearer k"}
    app = open_app(api_key=["k"])
    assert refusal(app, host="edit.example", **key) is None
    assert ask(app, "GET", "/v1/models", [("host", "edit.example")]).status_code == 401
    assert refusal(app, origin="https://evil.example", **key) == "origin_not_allowed"
    assert refusal(open_app(api_key=["k"], allowed_hosts=["a.example"]), host="b.example", **key) == "host_not_allowed"


def test_an_allowed_page_reads_answers_and_refusals() -> None:
    app, origin = open_app(api_key=["k"], allowed_origins=["https://page.example"]), ("origin", "https://page.example")
    refused = ask(app, "GET", "/v1/models", [origin])
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin[1])
    asks = [("access-control-request-method", "DELETE"), ("access-control-request-headers", "api-key")]
    preflight = ask(app, "OPTIONS", "/v1/templates/x", [origin, *asks])
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, origin[1])
    foreign = ask(app, "OPTIONS", "/v1/templates/x", [("origin", "https://evil.example"), *asks])
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in foreign.headers
    assert refusal(open_app(allowed_origins=["*"]), origin="https://any.example") is None


def test_a_client_without_a_host() -> None:
    """Probes of old load balancers send none; a browser always sends one."""
    app = open_app()
    statuses = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def call() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models", "headers": []}
        await app(scope | {"query_string": b"", "server": ("127.0.0.1", 80)}, None, send)  # type: ignore[arg-type]

    asyncio.run(call())
    assert statuses[0] == 200
