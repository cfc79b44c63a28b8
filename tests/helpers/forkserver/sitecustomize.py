"""Runs first in every Python process that tests start, since its folder is on their path. It does two things.

A nursery (`python -m instgenie.workers.nursery`), a process of a worker that is bound to no parent, one that loads
weights to be timed and our commands spend seconds on imports, and a run of all tests starts hundreds. Here such a
process asks a fork server (`server.py`), which has imported everything, for a process in its place: one with its
command line, environment, folder and files. From then on it stands for that process: it passes signals on, and it ends
as that process ends. If it is killed, that process is killed a moment later.
Without the variable `TESTS_FORK_FOLDER` every process does its work itself.

A test that names a file in the variable `TESTS_QUIRK` changes with it how worker processes behave.
"""

import os
import sys

FOLDER = "TESTS_FORK_FOLDER"  # of the fork servers' sockets
QUIRK = "TESTS_QUIRK"
COMMANDS = ("bench", "edit", "register")  # those that import torch
UNBOUND = '"parent":null'  # in the configuration of a worker's process
# variables that something reads while it is imported: processes that differ in them have different fork servers
EARLY = ("OMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_", "DIFFUSERS_")
LATE = ("TORCHINDUCTOR_CACHE_DIR",)  # set by torch itself, in processes that have imported it
# those that nurseries or commands set for themselves
USUAL = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
FORWARDED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")


def play_quirk():
    """Run the file that a test has named, if this is a process of a worker."""
    if (quirk := os.environ.get(QUIRK)) and "instgenie.workers" in " ".join(sys.orig_argv):
        with open(quirk) as file:
            exec(compile(file.read(), quirk, "exec"), {})


def hand_over(folder, kind):
    """Have this process's work done by one that is forked, and end as it does."""
    import json
    import signal
    import socket
    from contextlib import suppress

    numbers = [getattr(signal, name) for name in FORWARDED]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until there is a process to pass them on to
    server = connect(folder, kind)
    here = os.open(".", os.O_RDONLY)
    told = {"command": sys.orig_argv, "environment": dict(os.environ), "pid": os.getpid()}
    socket.send_fds(server, [json.dumps(told).encode()], [0, 1, 2, here])
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(nothing, file)
    pid = int(server.recv(100))

    def pass_on(number, _):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in numbers:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    code = int(server.recv(100) or -signal.SIGKILL)
    if code < 0:
        if -code in numbers:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def connect(folder, kind):
    """Connect to the fork server of a kind for this environment. The first that asks starts it."""
    import fcntl
    import hashlib
    import socket

    environment = USUAL | os.environ
    early = sorted(item for item in environment.items() if item[0].startswith(EARLY) and item[0] not in LATE)
    place = os.path.join(folder, f"{kind}-{hashlib.sha256(repr(early).encode()).hexdigest()[:16]}")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            server.connect(place)
        except (FileNotFoundError, ConnectionRefusedError):  # nobody has started it, or it has died
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                if os.path.exists(place):
                    os.unlink(place)
                listener.bind(place)
                listener.listen(100)
                start_server(kind, listener.fileno(), environment, f"{place}.log")
            server.connect(place)
    return server


def start_server(kind, listener, environment, log):
    """Start a fork server that is no child of this process and holds none of its files."""
    import subprocess

    if (pid := os.fork()) == 0:
        command = [sys.executable, os.path.join(os.path.dirname(__file__), "server.py"), kind, str(listener)]
        with open(log, "w") as output:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "start_new_session": True}
            subprocess.Popen(command, env=environment, pass_fds=[listener], **options)
        os._exit(0)
    os.waitpid(pid, 0)


def kind_of(flag="", module="", command="", config="", *_):
    """Which fork server forks a process with these arguments: one that has imported torch and the models, or what other
    commands import. None: the process does its work itself."""
    if flag != "-m" or (module == "instgenie.workers" and UNBOUND not in config):
        return None
    if module == "instgenie":
        return "models" if command in COMMANDS else "commands"
    is_forked = module in ("instgenie.bench.load_once", "instgenie.workers", "instgenie.workers.nursery")
    return "models" if is_forked else None


if (folder := os.environ.get(FOLDER)) and (kind := kind_of(*sys.orig_argv[1:])):
    hand_over(folder, kind)
play_quirk()
