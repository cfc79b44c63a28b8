"""A process as the system sees it: bound to its parent, so that none is left behind, and named. Imports nothing that
takes time."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
SECONDS_BETWEEN_LOOKS = 0.2


def die_with(parent: int) -> None:
    """End this process when its parent dies: the system kills it where it can, elsewhere a thread watches."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        check_parent(parent)  # it may have died before
    else:
        threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()


def outlive_thread() -> None:
    """Take back `die_with` on Linux, where the system takes the end of the thread that started this process for the
    death of its parent. From here on the process has to check its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def watch_parent(parent: int) -> None:
    while True:
        check_parent(parent)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def check_parent(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


def set_name(role: str) -> None:
    """Name this process in lists of processes, by 15 bytes at most."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"genie-{role}".encode())
