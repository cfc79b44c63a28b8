"""The fork server of the tests: `server.py KIND LISTENER`, started by `sitecustomize.py`. It imports what a nursery
imports, or what commands without a model import, and forks a process for each connection, without threads. It ends with
the tests, and its processes end with it."""

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

import sitecustomize

from instgenie import cli
from instgenie.cluster.config import Role

PARENT = "TESTS_FORK_PARENT"  # the process id of the tests
MAX_REQUEST_BYTES = 2**18


class Fork(NamedTuple):
    pid: int
    asker: socket.socket  # of the process that it stands for


def serve(listener: socket.socket, parent: int) -> dict[str, Any]:
    """Take requests. Returns in forked processes only, with what they are to do."""
    forks: dict[int, Fork] = {}  # by a descriptor that becomes readable when the process ends
    server, poll = os.getpid(), select.poll()
    for file in (listener, parent):
        poll.register(file, select.POLLIN)
    while True:
        file, _ = poll.poll()[0]
        if file == parent:
            for fork in forks.values():
                os.kill(fork.pid, signal.SIGKILL)
            os._exit(0)
        elif file == listener.fileno():
            asker, _ = listener.accept()
            data, files, _, _ = receive(asker)
            if not data:  # it was killed
                asker.close()
                continue
            if (pid := os.fork()) == 0:
                for descriptor in (listener.detach(), asker.detach(), parent, *forks):
                    os.close(descriptor)
                for other in forks.values():
                    other.asker.close()
                return json.loads(data) | {"files": files, "server": server}
            for descriptor in files:
                os.close(descriptor)
            with suppress(OSError):  # it was killed, which is seen below
                asker.send(str(pid).encode())
            forks[ended := os.pidfd_open(pid)] = Fork(pid, asker)
            poll.register(ended, select.POLLIN)
            poll.register(asker, select.POLLIN)
        elif file in forks:
            fork = forks.pop(file)
            _, status = os.waitpid(fork.pid, 0)
            poll.unregister(file)
            os.close(file)
            with suppress(KeyError):  # what asked was killed before
                poll.unregister(fork.asker)
            with suppress(OSError):  # it was killed just now
                fork.asker.send(str(os.waitstatus_to_exitcode(status)).encode())
            fork.asker.close()
        else:  # what asked was killed
            poll.unregister(file)
            [fork] = [fork for fork in forks.values() if fork.asker.fileno() == file]
            os.kill(fork.pid, signal.SIGKILL)


def receive(asker: socket.socket) -> tuple[bytes, list[int], int, Any]:
    try:
        return socket.recv_fds(asker, MAX_REQUEST_BYTES, 4)
    except ConnectionResetError:
        return b"", [], 0, None


def become(request: dict[str, Any]) -> None:
    """Be the process that was asked for."""
    *standard, folder = request["files"]
    for target, file in enumerate(standard):
        os.dup2(file, target)
    os.fchdir(folder)
    for file in request["files"]:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if fsspec := sys.modules.get("fsspec"):
        fsspec.config.conf.clear()  # of variables that the server had when it was imported
        fsspec.config.set_conf_env(fsspec.config.conf)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # what started the server had blocked some
    sys.orig_argv[:], sys.argv[:] = request["command"], request["command"][2:]
    os.getppid = partial(find_parent, os.getpid(), request["server"], request["pid"], os.getppid)
    sitecustomize.play_quirk()


def find_parent(own: int, server: int, asker: int, getppid: Callable[[], int]) -> int:
    """The parent of the process that this one stands for, as long as that and the fork server live. Processes that
    this one forks have their own."""
    if os.getpid() != own or getppid() != server:
        return getppid()
    try:
        return int(Path(f"/proc/{asker}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 1


def import_models() -> None:
    import torch

    for role in get_args(Role):
        import_module(f"instgenie.workers.{role}")
    for name in ("instgenie.bench.load_once", "instgenie.workers.__main__", "instgenie.workers.nursery"):
        import_module(name)
    torch.backends.mkldnn.enabled = False  # several times as long for the small matrices of tests


def leave(main: Callable[..., int | None], *arguments: str) -> NoReturn:
    """Run a program and end as it does, but let the system take back what was imported: to do so takes Python longer
    than most programs run."""
    try:
        code = main(*arguments)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise  # Python prints it
        code = ended.code
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    kind, listener = sys.argv[1:]
    gc.disable()  # nearly everything that is imported stays
    if kind == "models":
        import_models()
    else:
        import_module("instgenie.server.serve")
    gc.enable()
    gc.freeze()
    become(serve(socket.socket(fileno=int(listener)), os.pidfd_open(int(os.environ[PARENT]))))
    name = sys.argv[0]
    if name == "instgenie":
        leave(cli.main)
    elif name == "instgenie.bench.load_once":
        leave(import_module(name).main, *sys.argv[1:])
    else:
        leave(import_module("instgenie.workers.__main__" if name == "instgenie.workers" else name).main)
