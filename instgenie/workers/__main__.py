"""Starts a process of a worker: `python -m instgenie.workers MODULE CONFIG`. Imports nothing that takes time before the
process is bound to its parent, so that no process is left behind if the parent dies while this one loads."""

import gc
import importlib
import json
import signal
import sys

from instgenie.machine.binding import die_with, set_name


def main() -> None:
    module, config = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the cluster ends its processes in its own time
    if (parent := json.loads(config)["parent"]) is not None:
        die_with(parent)
    set_name(module.rpartition(".")[2])
    gc.disable()  # nearly all that is imported stays
    role = importlib.import_module(module)
    gc.freeze()
    gc.enable()
    role.main(config)


if __name__ == "__main__":
    main()
