"""Starts a process of a worker: `python -m instgenie.workers MODULE CONFIG`. Imports nothing that takes time before the
process is bound to its parent, so that no process is left behind if the parent dies while this one loads."""

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_LOOKS = 0.2


def main() -> None:
    module, config = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the cluster ends its processes in its own time
    if (parent := json.loads(config)["parent"]) is not None:
        die_with(parent)
    importlib.import_module(module).main(config)


def die_with(parent: int) -> None:
    """End this process when its parent dies: the system kills it where it can, elsewhere a thread watches."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        check_parent(parent)  # it may have died before
    else:
        threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()


def watch_parent(parent: int) -> None:
    while True:
        check_parent(parent)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def check_parent(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
