"""Fixtures of the server's tests: a server with narrow limits, a first edit, a browser and a visitor of the pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.serving import ALICE, ORIGIN, PICTURE, Running, edit, register, running_server

if TYPE_CHECKING:
    from helpers.browser import Visitor
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def narrow(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with narrow limits, without keys, without reuse, for one model name."""
    flags = [
        "--max-queue", "6", "--max-batch-size", "2", "--body-timeout", "1.5", "--max-body-mib", "1",
        "--max-megapixels", "0.1", "--max-decoded-gib", "0.001", "--allowed-origins", ORIGIN, "--no-reuse",
        "--max-steps", "900", "--max-n", "9", "--strict-model",
    ]  # fmt: skip
    with running_server(tmp_path_factory.mktemp("narrow"), str(folders["sd_fill"]), *flags) as running:
        yield running


@pytest.fixture(scope="session")
def edited(server: Running) -> Any:
    """An edit of a registered picture: like all later edits of it, it computes only its masked tokens."""
    register(server, PICTURE, num_inference_steps="2")
    return edit(server)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A browser per module: while one runs, its event loop keeps other tests from running theirs."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    from helpers.browser import EXECUTABLE, running_browser

    if EXECUTABLE is None:
        pytest.skip("no Chromium was found (apt-get install chromium-headless-shell)")
    with running_browser() as running:
        yield running


@pytest.fixture
def visitor(browser: "Browser", server: Running) -> "Iterator[Visitor]":
    """A visitor whose pages must log no error and must not ask any other host."""
    from helpers.browser import Visitor

    visitor = Visitor(browser, server.url, ALICE)
    yield visitor
    visitor.close()
    assert visitor.faults == []
