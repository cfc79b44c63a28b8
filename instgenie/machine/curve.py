"""Encryption of ZeroMQ sockets with CURVE. All keys derive from one secret of the cluster: who does not know the secret
can neither speak to a socket nor listen to it.

    keeper = Doorkeeper(context, secret)   once per context that binds sockets, before it binds the first
    secure_server(socket, secret)          a socket that binds
    secure_client(socket, secret)          a socket that connects

The secret travels in a process's environment, which other users of a machine cannot read."""

import hashlib
import hmac
import os
import secrets
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

SECRET = "INSTGENIE_CLUSTER_SECRET"  # variable that a launcher sets for the processes it starts


def make_secret() -> str:
    return secrets.token_hex(32)


def cluster_secret() -> str:
    """The secret of the cluster that this process belongs to; empty: its sockets are not encrypted."""
    return os.environ.get(SECRET, "")


def secure_server(socket: "zmq.Socket[Any]", secret: str) -> None:
    """Let only clients that know the secret connect. Call this before the socket is bound; the context has a
    `Doorkeeper`."""
    if secret:
        socket.curve_secretkey, socket.curve_publickey = key_pair(secret, "server")
        socket.curve_server = True


def secure_client(socket: "zmq.Socket[Any]", secret: str) -> None:
    """Connect only to servers that know the secret. Call this before the socket is connected."""
    if secret:
        _, socket.curve_serverkey = key_pair(secret, "server")
        socket.curve_secretkey, socket.curve_publickey = key_pair(secret, "client")


def key_pair(secret: str, side: str) -> tuple[bytes, bytes]:
    """The secret and the public key of one side."""
    own = z85.encode(hmac.digest(secret.encode(), side.encode(), hashlib.sha256))
    return own, zmq.curve_public(own)


class Doorkeeper:
    """Answers, in a thread, whether a client that connects to a server socket of a context knows the secret. Without it
    the server's public key alone would do, which is no secret by design. Without a secret it does nothing."""

    def __init__(self, context: "zmq.Context[Any]", secret: str) -> None:
        self._authenticator: ThreadAuthenticator | None = None
        if secret:
            _, self._key = key_pair(secret, "client")
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """ZeroMQ asks with the key that a client has proved to hold."""
        return hmac.compare_digest(key, self._key)

    def close(self) -> None:
        """End the thread. The context is closed after it."""
        if self._authenticator:
            self._authenticator.stop()
