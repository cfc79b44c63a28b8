"""The command line: the commands, their exit codes, and errors as one line. Each command adds its own arguments."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from instgenie.cli.bench import add_bench, add_calibrate
from instgenie.cli.edit import add_edit, add_register
from instgenie.cli.screen import complain, quiet_libraries
from instgenie.cli.status import add_status
from instgenie.cli.train_reuse import add_train_reuse
from instgenie.errors import InstGenieError
from instgenie.machine.version import package_version
from instgenie.server.config import MODEL, OPTIONS, read_config
from instgenie.server.options import add_flags, nearest

VERSION = package_version() or "(not installed)"
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown option and name the most similar one."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(options, "parser", self)
            command.error(f"unknown argument {unknown[0]}{nearest(unknown[0], command._option_string_actions)}")
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(given)
    options.command_line = shlex.join(["instgenie", *given])
    quiet_libraries()
    try:
        return options.run(options) or 0
    except InstGenieError as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="instgenie", description="Mask-guided image editing with diffusion models.")
    parser.add_argument("--version", action="version", version=f"instgenie {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add, short, about) in COMMANDS.items():
        command = commands.add_parser(name, help=short, description=about)
        command.set_defaults(parser=command)
        add(command)
    return parser


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_serve)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL.about)
    about_file = "TOML file with any of these options, such as port = 8000 for --port"
    parser.add_argument("--config", metavar="FILE", help=about_file)
    add_flags(parser, OPTIONS)


def run_serve(options: argparse.Namespace) -> int:
    config = read_config(vars(options), os.environ)
    from instgenie.server.serve import serve  # imports the web framework

    return serve(config, VERSION)


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, str]] = {
    "edit": (add_edit, "edit a photograph", "Edit the masked part of a photograph."),
    "register": (
        add_register,
        "prepare a photograph for edits",
        "Compute the activations that edits of a photograph reuse, and keep them in the cache.",
    ),
    "calibrate": (
        add_calibrate,
        "measure this device",
        "Measure steps of the model and transfers on this device, and keep the fitted latency model for planning.",
    ),
    "train-reuse": (
        add_train_reuse,
        "train the predictor of --reuse-changed",
        "Make pictures from prompts, and fit a predictor of when their predictions can be guessed instead of computed.",
    ),
    "serve": (
        add_serve,
        "serve OpenAI's images API",
        "Serve OpenAI's images API. Every option can also be set by an environment variable, such as INSTGENIE_PORT, "
        "or by a line of a TOML file.",
    ),
    "status": (
        add_status,
        "show a running server",
        "Show a running server and its cluster: nodes, workers, their batches and queues, activations, fronts.",
    ),
    "bench": (add_bench, "measure speed and quality", "Measure speed and quality."),
}
