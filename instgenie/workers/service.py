"""A process that helps workers with their steps: it hears the cluster and the workers, and answers the workers. Knows
sockets; its kinds know the messages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from instgenie.cluster.wire import Frame, Message, Stop, encode
from instgenie.workers.line import Line

Client: TypeAlias = bytes  # the identity of a worker's socket


class StepService(ABC):
    def __init__(self, socket: Any, line: Line) -> None:
        self.socket, self.line = socket, line
        self.is_stopped = False

    def hear(self, wait: bool) -> None:
        """Read all messages of the cluster and of the workers."""
        while received := self.line.receive(wait):
            wait = False
            if isinstance(received[0], Stop):
                self.is_stopped = True
                return
        while self.socket.poll(0):
            client, head, *frames = self.socket.recv_multipart(copy=False)
            self.accept(client.bytes, self.decode(head.buffer), [frame.buffer for frame in frames])

    def send(self, client: Client, message: Message, frames: Sequence[Frame] = ()) -> None:
        self.socket.send_multipart([client, encode(message), *frames], copy=False)

    @abstractmethod
    def decode(self, head: Frame) -> object: ...

    @abstractmethod
    def accept(self, client: Client, message: object, frames: Sequence[Frame]) -> None: ...
