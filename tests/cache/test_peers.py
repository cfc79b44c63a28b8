"""Templates in the memory of peers: real sockets and threads, pieces so small that a span has several."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import zmq
from helpers.spans import GIB, KEY, SLOT, SPANS, STEPS, equal, is_found, make_span, make_spans, other_key, put

from instgenie.cache import peers, pieces, sharing
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.peers import PeerTier
from instgenie.cache.pieces import SpanGone, SpanLayout, SpanPiece, read_layout
from instgenie.cache.remote import RemoteTier
from instgenie.cache.sharing import PeerServer, Throttle
from instgenie.cache.store import Lookup, Store
from instgenie.jobs.activations import Key


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, peers, sharing):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)


def make_host(*keys: Key) -> HostTier:
    host = HostTier(GIB)
    for key in keys:
        for span in make_spans():
            host.store(key, span)
    return host


Serve = Callable[..., PeerServer]
Reach = Callable[..., PeerTier]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts peers, which have a template in memory."""
    servers = []

    def start(host: HostTier | None = None, secret: str = "") -> PeerServer:
        servers.append(PeerServer("tcp://127.0.0.1:*", [host or make_host(KEY)], secret=secret))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def reach() -> Iterator[Reach]:
    """Makes tiers that know which addresses have the template."""
    tiers = []

    def make(*addresses: str, **fields: Any) -> PeerTier:
        tiers.append(PeerTier(**{"max_bytes": GIB, "patience": 10.0} | fields))
        tiers[-1].learn(KEY, addresses)
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def test_spans_arrive_as_they_are(serve: Serve, reach: Reach) -> None:
    server = serve()
    tier = reach(server.address)
    assert tier.missing(KEY, SPANS) == []
    assert all(equal(tier.load(KEY, span.steps), span) for span in make_spans())
    assert server.num_bytes_sent == SLOT > 10 * pieces.PIECE_BYTES
    assert tier.missing(other_key(1), SPANS) == SPANS  # nobody was named
    tier.learn(other_key(1), [server.address])
    assert (tier.missing(other_key(1), SPANS), tier.load(other_key(1), STEPS)) == (SPANS, None)
    tier.forget(KEY)
    assert (tier.missing(KEY, SPANS), tier.load(KEY, STEPS)) == (SPANS, None)


def test_a_template_that_keeps_every_third_step_arrives_whole(serve: Serve, reach: Reach) -> None:
    """The bytes of a step are those of a kept one, and the size of the whole template is that of its kept steps."""
    strided = replace(KEY, stride=3, cache_dtype="int4")
    assert strided.spans == [range(2)]
    host, span = HostTier(GIB), make_span(range(2))
    host.store(strided, span)
    kept = SLOT // KEY.num_steps * 2
    tier = reach(max_bytes=kept)
    tier.learn(strided, [serve(host).address])
    tier.learn(KEY, [serve(host).address])
    assert tier.missing(strided, strided.spans) == []
    assert equal(tier.load(strided, range(2)), span)
    assert tier.missing(KEY, SPANS) == SPANS  # a template that keeps every step is another one
    store = Store(host=HostTier(GIB), peers=tier)
    found = store.get(strided)
    assert found
    assert (found.tier, store.num_bytes(strided)) == ("peer", kept)


def test_numbers_of_another_version_are_not_shared(serve: Serve, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions side by side: the key has the version of the numbers, a request that of the layout."""
    server = serve(make_host(replace(KEY, code="1")))
    newer = replace(KEY, code="2")
    tier = reach()
    for key in (newer, replace(KEY, code="1")):
        tier.learn(key, [server.address])
    assert tier.missing(newer, SPANS) == SPANS
    assert tier.missing(replace(KEY, code="1"), SPANS) == []
    monkeypatch.setattr(peers, "LAYOUT", "0")
    assert tier.missing(replace(KEY, code="1"), SPANS) == SPANS
    assert tier.load(replace(KEY, code="1"), STEPS) is None


def test_spans_of_several_peers_add_up(serve: Serve, reach: Reach) -> None:
    first, second = HostTier(GIB), HostTier(GIB)
    first.store(KEY, make_span(SPANS[0]))
    second.store(KEY, make_span(SPANS[1]))
    tier = reach(serve(first).address, serve(second).address)
    assert tier.missing(KEY, SPANS) == []
    assert all(equal(tier.load(KEY, steps), make_span(steps)) for steps in SPANS)


def test_a_peer_that_is_gone_is_left_alone_and_the_next_is_asked(
    serve: Serve, reach: Reach, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.bind("tcp://127.0.0.1:*")
        address = silent.getsockopt_string(zmq.LAST_ENDPOINT)
        tier = reach(address, "tcp://127.0.0.1:1", serve().address, patience=0.3)
        assert equal(tier.load(KEY, STEPS), make_span())
        assert f"{address} is left alone for 1 seconds: GoneError: it does not answer within 0.3 s" in caplog.text
        assert "tcp://127.0.0.1:1 is left alone for 1 seconds: GoneError: the connection is lost" in caplog.text
        caplog.clear()
        assert equal(tier.load(KEY, SPANS[1]), make_span(SPANS[1]))
        assert caplog.text == ""  # neither was asked again


@pytest.mark.parametrize("fault", ["evicted", "bytes", "size", "place", "no bytes", "layout", "garbage"])
def test_a_peer_that_fails_in_the_middle_is_no_source(
    fault: str, serve: Serve, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, num_answers = serve(), 0
    answer = server.answer

    def faulty(request: Any) -> Any:
        nonlocal num_answers
        num_answers += 1
        message, data = answer(request)
        if fault == "layout" and isinstance(message, SpanLayout):
            return SpanLayout(message.num_bytes, message.tensors[:1]), None
        if num_answers == 5:
            match fault:
                case "evicted":
                    return SpanGone(), None
                case "bytes":
                    data[7] ^= 1
                case "size":
                    return message, data[:-1]
                case "place":
                    return SpanPiece(0, message.checksum), data
                case "no bytes":
                    return message, None
                case "garbage":
                    return "what", None
        return message, data

    monkeypatch.setattr(server, "answer", faulty)
    tier = reach(server.address)
    assert tier.load(KEY, STEPS) is None
    is_alone = tier.load(KEY, STEPS) is None
    assert is_alone == (fault != "evicted")  # an eviction is no fault of the peer


def test_a_peer_that_dies_in_the_middle_is_noticed_at_once(
    serve: Serve, reach: Reach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection breaks; the time limit, which is far away, plays no part."""
    server, num_answers, dying = serve(), 0, threading.Event()
    answer = server.answer

    def last_words(request: Any) -> Any:
        nonlocal num_answers
        num_answers += 1
        if num_answers == 5:
            dying.set()
            server._closing.wait()
        return answer(request)

    monkeypatch.setattr(server, "answer", last_words)
    tier = reach(server.address, patience=1000.0)
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(tier.load, KEY, STEPS)
        assert dying.wait(60)
        server.close()
        assert loading.result(60) is None
    assert "GoneError: the connection is lost" in caplog.text


@pytest.mark.gpu
def test_spans_come_from_the_memory_of_a_device(reach: Reach) -> None:
    gpu = GpuTier(torch.device("cuda"), GIB)
    for span in make_spans():
        gpu.store(KEY, span)
    server = PeerServer("tcp://127.0.0.1:*", [HostTier(GIB), gpu])
    assert all(equal(reach(server.address).load(KEY, span.steps), span) for span in make_spans())
    server.close()


@pytest.mark.parametrize(
    ("theirs", "mine"), [("a secret", "another"), ("a secret", ""), ("", "a secret")], ids=["other", "none", "one side"]
)
def test_only_peers_with_the_secret_are_served(theirs: str, mine: str, serve: Serve, reach: Reach) -> None:
    server = serve(secret=theirs)
    assert reach(server.address, secret=mine, patience=1.0).load(KEY, STEPS) is None
    assert server.num_bytes_sent == 0
    assert equal(reach(server.address, secret=theirs).load(KEY, STEPS), make_span())


def test_nonsense_does_not_end_the_service(serve: Serve, reach: Reach) -> None:
    server = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(server.address)
        for nonsense in (b"", b"\xff", pieces.encode_message(pieces.FindSpans(pieces.LAYOUT, "no key"))):
            stranger.send(nonsense)
        stranger.send(pieces.encode_message(pieces.ReadPiece(pieces.LAYOUT, KEY.text, (0, 4), -5, 10**12)))
        assert stranger.poll(10_000)
        _, data = stranger.recv_multipart()
        assert len(data) == pieces.PIECE_BYTES  # no request gets more than a piece
    assert equal(reach(server.address).load(KEY, STEPS), make_span())


def test_layouts_are_checked_before_memory_is_taken() -> None:
    good = SpanLayout(4 * 512, (("float32", (2, 3)), ("bfloat16", (4,))))
    assert [spec.shape for spec in read_layout(good, KEY, STEPS, GIB)] == [(2, 3), (4,)]
    bad = [
        SpanLayout(4 * 512, (("float32", (-2, 3)), ("bfloat16", (4,)))),
        SpanLayout(4 * 512, (("load", (2, 3)), ("bfloat16", (4,)))),
        SpanLayout(4 * 512 - 1, good.tensors),
        SpanLayout(4 * 256, good.tensors[:1]),
        SpanLayout(4 * 2**40, (("uint8", (2**39,)), ("uint8", (2**39,)))),
    ]
    for layout in bad:
        with pytest.raises(peers.DamagedError):
            read_layout(layout, KEY, STEPS, GIB)


def test_bytes_in_a_second_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(sharing.time, "monotonic", lambda: 100.0 + sum(slept))
    monkeypatch.setattr(sharing.time, "sleep", slept.append)
    throttle = Throttle(bytes_per_second=100.0)
    for _ in range(30):
        throttle.wait(10)
    assert sum(slept) == pytest.approx(2.9, abs=0.1)


# the store


def test_a_store_copies_from_a_peer_what_it_lacks(serve: Serve, reach: Reach, remote: RemoteTier) -> None:
    server = serve()
    store = Store(host=HostTier(GIB), remote=remote, peers=reach(server.address))
    loaded: list[Any] = []
    store.loads.on_loaded = lambda *told: loaded.append(told)
    assert store.find(KEY) is Lookup.PENDING
    assert store.missing(KEY) == SPANS  # a registration is not done because a peer has the template
    found = store.get(KEY)
    assert found
    assert found.tier == "peer"
    assert is_found(store, KEY)
    num_bytes = sum(span.num_bytes for span in make_spans())
    assert [told[:2] for told in loaded] == [("peer", num_bytes)]
    again = store.get(KEY)
    assert again
    assert again.tier == "host"
    store.settle()
    assert remote.missing(KEY, SPANS) == []  # the peer may die before it has written the template
    assert store.status().keys() == {"host", "remote"}
    store.forget(KEY)
    assert store.find(KEY) is Lookup.MISS  # though the peer still has it
    store.writer.close()


def test_what_a_peer_does_not_give_comes_from_the_remote_tier(serve: Serve, reach: Reach, remote: RemoteTier) -> None:
    origin = Store(remote=remote)
    put(origin, KEY)
    origin.close()
    first = HostTier(GIB)
    first.store(KEY, make_span(SPANS[0]))
    store = Store(host=HostTier(GIB), remote=remote, peers=reach("tcp://127.0.0.1:1", serve(first).address))
    found = store.get(KEY)
    assert found
    assert found.tier == "remote"
    assert is_found(store, KEY)
    store.writer.close()
