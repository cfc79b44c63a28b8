"""Sockets of a cluster: who holds the secret speaks, nobody else does."""

import zmq

from instgenie.machine.curve import Doorkeeper, make_secret, secure_client, secure_server

SECRET, OTHER = make_secret(), make_secret()


def reaches(secret: str, server: str = SECRET, **options: bytes) -> bool:
    """True if a message arrives from a peer with this secret."""
    with zmq.Context() as context:
        keeper = Doorkeeper(context, server)
        with context.socket(zmq.ROUTER) as bound, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            secure_server(bound, server)
            bound.bind("tcp://127.0.0.1:*")
            secure_client(peer, secret)
            for name, value in options.items():
                setattr(peer, name, value)
            peer.connect(bound.getsockopt_string(zmq.LAST_ENDPOINT))
            peer.send(b"hello")
            arrived = bool(bound.poll(2000 if secret == server and not options else 300))
        keeper.close()
        return arrived


def test_a_holder_of_the_secret_is_heard() -> None:
    assert reaches(SECRET)


def test_a_peer_with_another_secret_is_not_heard() -> None:
    assert not reaches(OTHER)


def test_a_peer_without_a_secret_is_not_heard() -> None:
    assert not reaches("")


def test_a_peer_that_knows_only_the_public_key_of_the_socket_is_not_heard() -> None:
    public, private = zmq.curve_keypair()
    assert not reaches(SECRET, curve_publickey=public, curve_secretkey=private)


def test_local_sockets_need_no_secret() -> None:
    assert reaches("", "")
