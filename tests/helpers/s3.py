"""A real S3-compatible server, as a process of its own, on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import fsspec

BUCKET = "bucket"
URL = f"s3://{BUCKET}/templates"


class Server:
    """Keeps objects in its memory: they are lost when it is killed."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": f"http://127.0.0.1:{self.port}", "key": "key", "secret": "secret"}

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        environment = os.environ | {"AWS_DEFAULT_REGION": "us-east-1"}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self._answers():
            assert self.process.poll() is None
            time.sleep(0.05)
        self.files().mkdir(BUCKET)

    def files(self) -> Any:
        return fsspec.filesystem("s3", **self.options, skip_instance_cache=True, use_listings_cache=False)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
