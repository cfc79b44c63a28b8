"""Runs real clients against a server of the built-in model and prints what each of them gets. From the root of the
repository; it installs the clients from PyPI and npm into `--folder` first, which takes a few minutes:

    PYTHONPATH=tests python -m helpers.clients [--folder FOLDER] [--base-url http://127.0.0.1:8000]

Every case must be answered with a picture, or be refused for a reason that the client shows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from helpers.clients.front_ends import run_front_ends
from helpers.serving import alpha_png, mask, picture, png, running_server

HERE = Path(__file__).parent
SIZE = (96, 128)
PYTHONS = {"openai": ["openai"], "openai-1": ["openai==1.109.*"], "litellm": ["litellm"]}
NODE = ["openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"]
SCRIPTS = {"openai": "openai_client.py", "openai-1": "openai_client.py", "litellm": "litellm_client.py"}


def install(folder: Path) -> None:
    for name, packages in PYTHONS.items():
        if not (folder / name / "done").exists():
            subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
            subprocess.run([folder / name / "bin" / "pip", "install", "-qq", *packages], check=True)
            (folder / name / "done").touch()
    if not (folder / "node" / "done").exists():
        (folder / "node").mkdir(exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", folder / "node", *NODE], check=True)
        (folder / "node" / "done").touch()


def write_pictures(folder: Path) -> None:
    (folder / "image.png").write_bytes(png(picture(1, SIZE)))
    (folder / "other.png").write_bytes(png(picture(2, SIZE)))
    (folder / "mask.png").write_bytes(alpha_png(mask(SIZE)))


def run(command: list[str | Path]) -> list[dict[str, str]]:
    """Run a client's script, which prints one JSON object per case."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        rows.append({"client": str(command[0]), "case": "(script)", "outcome": "BROKEN: " + done.stderr[-500:]})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Run real clients against a server.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "instgenie-clients")
    parser.add_argument("--base-url", help="a running server; without it one is started")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    install(options.folder)
    write_pictures(options.folder)
    with ExitStack() as stack:
        url = options.base_url
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(running_server(folder, "builtin", device=options.device)).url
        rows = []
        for name, script in SCRIPTS.items():
            rows += run([options.folder / name / "bin" / "python", HERE / script, url, options.folder])
        (options.folder / "node" / "clients.mjs").write_text((HERE / "clients.mjs").read_text())
        rows += run(["node", options.folder / "node" / "clients.mjs", url, options.folder])
        rows += run_front_ends(url, options.folder)
    for row in rows:
        print(f"{row['client']:<32} {row['case']:<22} {row['outcome']}")
    return int(any("BROKEN" in row["outcome"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
