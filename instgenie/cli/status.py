"""`instgenie status`: a running server and its cluster as tables."""

import argparse
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from instgenie.cli.arguments import rate
from instgenie.errors import InstGenieError

URL = "http://127.0.0.1:8000"
KEY = "INSTGENIE_API_KEY"
SECONDS_TO_ANSWER = 10.0
COLOURS = {"ready": "green", "starting": "yellow", "loading": "yellow", "waiting": "yellow", "draining": "cyan"}
MAX_WATCHED = 200  # workers of which a watched table shows each


class StatusError(InstGenieError):
    """A server's status cannot be read."""


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_status)
    parser.add_argument("url", nargs="?", default=URL, metavar="URL", help=f"address of the server (default {URL})")
    about_key = f"key that the server asks for; default: the variable {KEY}"
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get(KEY), help=about_key)
    parser.add_argument("--json", action="store_true", help="print what the server tells, as JSON")
    parser.add_argument("--watch", action="store_true", help="print it again and again, until interrupted")
    parser.add_argument("--every", type=rate, default=2.0, metavar="SECONDS", help="pause of --watch (default 2)")


def run_status(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not options.watch:
        status = fetch(options.url, options.api_key)
        if options.json:
            print(json.dumps(status, indent=2))
        else:
            console.print(picture_of(status))
        return
    if options.json:
        while True:
            print(json.dumps(fetch(options.url, options.api_key)), flush=True)
            time.sleep(options.every)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(picture_of(fetch(options.url, options.api_key)), refresh=True)
            time.sleep(options.every)


def fetch(url: str, key: str | None) -> dict[str, Any]:
    import httpx

    address = url if "://" in url else f"http://{url}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{address.rstrip('/')}/status", headers=headers, timeout=SECONDS_TO_ANSWER)
        content = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StatusError(f"no InstGenIE server answers at {address}: {error or type(error).__name__}") from None
    if answer.status_code == 200 and isinstance(content, dict) and "workers" in content:
        return content
    told = content.get("error", {}).get("message") if isinstance(content, dict) else None
    raise StatusError(f"{address} answers {answer.status_code}: {told or 'not a status of InstGenIE'}")


def picture_of(status: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [headline(status), Text(figures(status))]
    if status["nodes"]:
        parts.append(node_table(status))
    parts.append(worker_table(status))
    if status["fronts"]:
        parts.append(Text(f"{plural(len(status['fronts']), 'front')}: {', '.join(status['fronts'])}"))
    troubles = [trouble for worker in status["workers"] for trouble in troubles_of(worker)]
    parts += [Text(trouble, style="red") for trouble in troubles]
    return Group(*parts)


def headline(status: Mapping[str, Any]) -> Any:
    from rich.text import Text

    states = [worker["state"] for worker in status["workers"]]
    num_ready, num_nodes = states.count("ready"), len(status["nodes"])
    text = Text.assemble(
        (f"InstGenIE {status['version']}", "bold"), f"  {status['model']}  ", state_text(status["state"]),
        f"  {num_ready} of {plural(len(states), 'worker')} ready",
    )  # fmt: skip
    return text.append(f" on {plural(num_nodes, 'node')}") if num_nodes else text


def figures(status: Mapping[str, Any]) -> str:
    hits, queries = sum(status["cache_hits"].values()), status["num_cache_queries"]
    by_tier = ", ".join(f"{tier} {number}" for tier, number in status["cache_hits"].items() if number)
    shown = [
        f"{status['num_running']} running, {status['num_waiting']} of at most {status['max_queue']} waiting",
        f"{status['num_finished']} finished, {status['num_failed']} failed, {status['num_cancelled']} cancelled",
        f"{share(hits, queries)} of the edits found their template" + (f" ({by_tier})" if by_tier else ""),
    ]
    if status["num_registrations_waiting"]:
        shown.append(f"{plural(status['num_registrations_waiting'], 'registration')} waiting")
    return "\n".join(shown)


def node_table(status: Mapping[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="nodes", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("node", no_wrap=True)
    for heading in ("workers", "ready", "batch", "waiting", "cores", "memory left"):
        table.add_column(heading, justify="right")
    for node in status["nodes"]:
        own = [worker for worker in status["workers"] if worker["node"] == node["name"]]
        sums = (sum(worker[name] for worker in own) for name in ("num_running", "num_waiting"))
        num_ready = sum(worker["state"] == "ready" for worker in own)
        memory = "unknown" if node["available_bytes"] is None else gib(node["available_bytes"])
        counts = (node["num_workers"], num_ready, *sums, node["num_cores"])
        table.add_row(node["name"], *map(str, counts), memory)
    return table


def worker_table(status: Mapping[str, Any]) -> Any:
    """One row per worker, narrow enough for 80 columns with the usual names of nodes; longer names are folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    has_nodes = bool(status["nodes"])
    table = Table(title="workers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("#", justify="right", no_wrap=True)
    if has_nodes:
        table.add_column("node", overflow="fold")
    for heading in ("device", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "queue", "steps/s", "busy", "templates"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in status["workers"][:MAX_WATCHED]:
        table.add_row(
            str(worker["index"]),
            *([worker["node"] or "–"] if has_nodes else []),
            worker["device"],
            state_text(worker["state"]),
            f"{worker['num_running']}/{status['max_batch_size']}",
            str(worker["num_waiting"]),
            f"{worker['steps_per_second']:.1f}",
            f"{worker['predicted_seconds']:.1f} s",
            templates_text(worker),
        )
    if (num_hidden := len(status["workers"]) - MAX_WATCHED) > 0:
        table.caption = f"and {num_hidden} more; --json has all"
    return table


def templates_text(worker: Mapping[str, Any]) -> str:
    """The number of templates, and below it the bytes of each tier that has any."""
    tiers = [f"{tier} {gib(num)}" for tier, num in worker["tier_bytes"].items() if num]
    return "\n".join([str(worker["num_templates"]), *tiers])


def troubles_of(worker: Mapping[str, Any]) -> list[str]:
    """Why processes are not running, and how often they were restarted, one line each."""
    troubles = []
    for process in worker["processes"]:
        if process["message"] and process["state"] != "ready":
            troubles.append(f"worker {worker['index']}, {process['role']}: {process['message']}")
        if process["num_restarts"]:
            times = plural(process["num_restarts"], "time")
            troubles.append(f"worker {worker['index']}, {process['role']}: restarted {times}")
    return troubles


def state_text(state: str) -> Any:
    from rich.text import Text

    return Text(state, style=COLOURS.get(state, "red"))


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
