"""The nursery of a launcher: `python -m instgenie.workers.nursery PARENT`. It imports what the roles import, once, and
forks a process for each request that arrives at its standard input, which is a socket (`cluster/nursery.py` sends).

No thread runs here and nothing calls CUDA, so a forked process is as good as one that has imported everything itself.
Forked processes end with the nursery. The nursery ends with its parent, or when no request can come any more and its
last process has ended.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, get_args

from instgenie.cluster.config import Role
from instgenie.machine.binding import SECONDS_BETWEEN_LOOKS, check_parent, die_with, outlive_thread, set_name

MAX_REQUEST_BYTES = 2**18


class ForkFiles(NamedTuple):
    """What comes with a request."""

    stdin: int
    stdout: int
    stderr: int
    folder: int  # to work in
    report: int  # the end of a pipe, through which the requester is told what becomes of the process


class ForkRequest(NamedTuple):
    role: Role
    config: str
    environment: dict[str, str | None]  # what is different from the nursery's; None: not set
    files: ForkFiles


@dataclass(frozen=True)
class ForkedChild:
    pid: int
    report: int

    def tell(self, text: str) -> None:
        tell(self.report, text)


class Forker:
    def __init__(self, requests: socket.socket, parent: int) -> None:
        self.requests = requests
        self.parent = parent
        self.flaw = find_flaw()
        self.children: dict[int, ForkedChild] = {}  # by a descriptor that becomes readable when the process ends
        self.is_closed = False  # no request can come any more
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)

    def serve(self) -> ForkRequest:
        """Take requests. Returns in forked processes only, with what they are to do."""
        while self.children or not self.is_closed:
            for file, _ in self._poll.poll(1000 * SECONDS_BETWEEN_LOOKS)[:1]:  # it may settle others
                if file in self.children:
                    self.bury(file)
                elif file != self.requests.fileno():
                    self.give_up(file)
                elif (request := receive(self.requests)) is None:
                    self._poll.unregister(file)
                    self.is_closed = True
                elif self.fork(request):
                    return request
            check_parent(self.parent)
        os._exit(0)

    def fork(self, request: ForkRequest) -> bool:
        """Fork a process for a request. Returns whether this is the forked process."""
        report, nursery = request.files.report, os.getpid()
        if self.flaw:
            tell(report, f"unfit {self.flaw}")
        else:
            try:
                pid = os.fork()
            except OSError as error:
                tell(report, f"refused {error}")
            else:
                if pid == 0:
                    die_with(nursery)
                    self.forget_all()
                    return True
                self.adopt(ForkedChild(pid, os.dup(report)))
        for file in request.files:
            os.close(file)
        return False

    def adopt(self, child: ForkedChild) -> None:
        ends = os.pidfd_open(child.pid)
        self.children[ends] = child
        self._poll.register(ends, select.POLLIN)
        self._poll.register(child.report, 0)  # tells when nobody listens any more
        child.tell(f"forked {child.pid}")

    def forget_all(self) -> None:
        """Close, in a forked process, what belongs to the nursery."""
        self.requests.detach()  # standard input takes its place
        for ends, child in self.children.items():
            os.close(ends)
            os.close(child.report)

    def bury(self, ends: int) -> None:
        """Tell how a process has ended."""
        child = self.children.pop(ends)
        _, status = os.waitpid(child.pid, 0)
        child.tell(f"ended {os.waitstatus_to_exitcode(status)}")
        for file in (ends, child.report):
            with suppress(KeyError):  # the requester had given it up
                self._poll.unregister(file)
            os.close(file)

    def give_up(self, report: int) -> None:
        """Kill the process whose requester does not listen any more."""
        for child in self.children.values():
            if child.report == report:
                os.kill(child.pid, signal.SIGKILL)
        self._poll.unregister(report)


def tell(report: int, text: str) -> None:
    with suppress(BrokenPipeError):  # nobody listens
        os.write(report, f"{text}\n".encode())


def find_flaw() -> str:
    """Why this process must not fork, in words; empty: nothing is in the way."""
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{num_threads} threads run in the nursery"
    torch = sys.modules.get("torch")
    return "CUDA is initialised in the nursery" if torch and torch.cuda.is_initialized() else ""


def receive(requests: socket.socket) -> ForkRequest | None:
    """The next request; None if there will be none."""
    data, files, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, len(ForkFiles._fields))
    return ForkRequest(**json.loads(data), files=ForkFiles(*files)) if data else None


def put_on(request: ForkRequest) -> None:
    """Give this process the files, the folder and the environment that were asked for."""
    for target, file in enumerate(request.files[:3]):
        os.dup2(file, target)
    os.fchdir(request.files.folder)
    for file in request.files:
        os.close(file)
    for name, value in request.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def main() -> None:
    parent = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the processes of workers
    die_with(parent)
    set_name("nursery")
    gc.disable()  # nearly all that is imported stays: looking for garbage would take a seventh of the time
    roles = {role: importlib.import_module(f"instgenie.workers.{role}") for role in get_args(Role)}
    gc.enable()
    gc.collect()
    gc.freeze()  # what was imported stays shared with the forked processes, and is not collected there
    outlive_thread()
    check_parent(parent)
    request = Forker(socket.socket(fileno=0), parent).serve()
    put_on(request)
    set_name(request.role)
    roles[request.role].main(request.config)


if __name__ == "__main__":
    main()
