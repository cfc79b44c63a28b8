"""Encryption of ZeroMQ sockets with CURVE. All keys derive from one secret of the cluster: who does not know the secret
does not know the server's public key, which is never sent, and cannot complete a handshake with any socket.

The secret travels in a process's environment, which other users of a machine cannot read."""

import hashlib
import os

import zmq
from zmq.utils import z85

SECRET = "INSTGENIE_CLUSTER_SECRET"  # variable that a launcher sets for the processes it starts


def cluster_secret() -> str:
    """The secret of the cluster that this process belongs to; empty: its sockets are not encrypted."""
    return os.environ.get(SECRET, "")


def secure_server(socket: "zmq.Socket[bytes]", secret: str) -> None:
    """Let only clients that know the secret connect. Call this before the socket is bound."""
    if secret:
        socket.curve_secretkey, socket.curve_publickey = key_pair(secret, "server")
        socket.curve_server = True


def secure_client(socket: "zmq.Socket[bytes]", secret: str) -> None:
    """Connect only to servers that know the secret. Call this before the socket is connected."""
    if secret:
        _, socket.curve_serverkey = key_pair(secret, "server")
        socket.curve_secretkey, socket.curve_publickey = key_pair(secret, "client")


def key_pair(secret: str, side: str) -> tuple[bytes, bytes]:
    """The secret and the public key of one side."""
    own = z85.encode(hashlib.sha256(f"{side} of {secret}".encode()).digest())
    return own, zmq.curve_public(own)
