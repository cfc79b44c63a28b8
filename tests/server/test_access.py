"""Access to the server: API keys, public paths, origins, request ids."""

import pytest
from helpers.serving import ALICE, Running

GUARDED = [
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/images/edits"), ("POST", "/v1/images/generations"),
    ("GET", "/v1/templates"), ("POST", "/v1/templates"), ("GET", "/v1/templates/x"), ("DELETE", "/v1/templates/x"),
    ("GET", "/metrics"), ("GET", "/openapi.json"),
    ("GET", "/page/facts"), ("GET", "/engine/events"), ("GET", "/nowhere"), ("GET", "/health/"), ("GET", "//health"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_the_key_guards_everything(server: Running, method: str, path: str) -> None:
    headers = [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ALICE}"}, {"authorization": ALICE}]
    with server.http(key=None) as client:
        for header in headers:
            answer = client.request(method, server.url + path, headers=header)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (
                401,
                "authentication_error",
                "invalid_api_key",
            )


def test_health_is_public(server: Running) -> None:
    with server.http(key=None) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json() == {"status": "ok"}


def test_page_files_are_public_and_have_a_content_security_policy(server: Running) -> None:
    with server.http(key=None) as client:
        for path in ("/", "/engine", "/static/edit.js", "/static/examples/coffee.png"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "script-src 'self';" in answer.headers["content-security-policy"]
            assert client.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
        for path in ("/static/", "/static/../gate.py", "/static/%2e%2e/gate.py", "/static/examples/edits.toml"):
            assert client.get(path).status_code in (401, 404)


def test_no_origin_is_allowed_unless_named(server: Running) -> None:
    with server.http() as client:
        assert (
            "access-control-allow-origin" not in client.get("/health", headers={"origin": "https://evil.test"}).headers
        )


def test_request_ids(server: Running) -> None:
    with server.http() as client:
        assert client.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        for insane in ("x" * 129, "a b", "<script>"):
            made = client.get("/v1/models", headers={"x-request-id": insane}).headers["x-request-id"]
            assert made.startswith("req_")
