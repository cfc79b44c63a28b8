"""A Ray cluster on this machine, for a trial: a head and nodes beside it, each started by `ray start` as on a machine
of its own. A command runs with it, and everything ends with the command:

    python -m instgenie.cluster.ray.local NUM_NODES instgenie serve builtin

The head has no room for workers; the nodes divide the cores. The command finds the cluster in INSTGENIE_CLUSTER. The
pid of each node is printed: to kill that process and all below it is the death of a machine.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from instgenie.machine.cores import available_cores

STORE_BYTES = 100 * 2**20  # of Ray's object store, in which we keep nothing
SECONDS_TO_END = 10.0
COMMON = (
    "--block",
    "--disable-usage-stats",
    "--include-log-monitor=false",
    f"--object-store-memory={STORE_BYTES}",
    "--min-worker-port=0",  # any free port: the default range belongs to one node of a machine
    "--max-worker-port=0",
    "--metrics-export-port=0",
    "--dashboard-agent-listen-port=0",
    "--dashboard-agent-grpc-port=0",
    "--runtime-env-agent-port=0",
)


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    num_nodes, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the nodes that have started end, too
    num_cores = max(available_cores() // max(num_nodes, 1), 1)
    with LocalRay(num_nodes, num_cores) as ray:
        variables = {
            "INSTGENIE_CLUSTER": ray.address,
            "INSTGENIE_WORKERS": str(num_nodes),
            "INSTGENIE_WORKER_RESOURCES": f"CPU={num_cores}",
        }
        with suppress(KeyboardInterrupt):
            return run(command, os.environ | variables)
    return 130


def run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command to its end; it gets the signals that end this process."""
    child = subprocess.Popen(command, env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    return child.wait()


class LocalRay:
    """A head and nodes on this machine. A block that is left ends them all."""

    def __init__(self, num_nodes: int, num_cores: int) -> None:
        """Each node offers `num_cores` cores."""
        self.num_cores = num_cores
        self.nodes: list[subprocess.Popen[str]] = []  # the first is the head
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        ports = [f"--port={port}", f"--ray-client-server-port={free_port()}"]
        try:
            self.nodes.append(start("head", ["--head", *ports, "--num-cpus=0", "--include-dashboard=false"]))
            for _ in range(num_nodes):
                self.add()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "LocalRay":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def add(self) -> "subprocess.Popen[str]":
        """Join one more node."""
        name = f"node-{len(self.nodes)}"
        options = [f"--address={self.address}", f"--node-name={name}", f"--num-cpus={self.num_cores}"]
        self.nodes.append(start(name, options))
        return self.nodes[-1]

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.terminate()
        for node in self.nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(SECONDS_TO_END)
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)


def start(name: str, options: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a node and wait until it has joined. It has a process group of its own, which an interrupt of the terminal
    does not reach."""
    command = [str(Path(sys.executable).parent / "ray"), "start", *COMMON, *options]
    environment = os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    node = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True, text=True)
    print(f"Ray {name:<7} pid {node.pid}", flush=True)
    assert node.stdout
    for line in node.stdout:
        if "--block" in line:  # it says that it has started and waits for its end from here on
            return node
    raise RuntimeError(f"Ray's {name} could not start, and ended with exit code {node.wait()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
