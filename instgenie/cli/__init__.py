"""The command line. Knows the commands and how they end; each of them knows its own arguments."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from instgenie.cli.bench import add_bench, add_calibrate
from instgenie.cli.edit import add_edit, add_register
from instgenie.cli.screen import complain, quiet_libraries
from instgenie.errors import InstGenieError
from instgenie.server.config import MODEL, OPTIONS, read_config
from instgenie.server.options import add_flags, nearest

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An option that does not exist is refused with the nearest one that does."""
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
    parser = Parser(prog="instgenie", description="Mask-guided image editing.")
    parser.add_argument("--version", action="version", version=f"instgenie {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_edit(commands.add_parser("edit", help="edit a photograph", description="Edit a photograph."))
    about_register = "Compute ahead what edits of a photograph can reuse, and keep it in the cache."
    add_register(commands.add_parser("register", help="prepare a photograph for edits", description=about_register))
    about_calibrate = "Measure this device with the model's own steps, and keep what planning needs to know of it."
    add_calibrate(commands.add_parser("calibrate", help="measure this device", description=about_calibrate))
    about_serve = (
        "Serve OpenAI's images API. Every option may also be an environment variable or a line of a TOML file."
    )
    add_serve(commands.add_parser("serve", help="serve OpenAI's images API", description=about_serve))
    about_bench = "Measure speed and quality."
    add_bench(commands.add_parser("bench", help="measure speed and quality", description=about_bench))
    return parser


def own_version() -> str:
    try:
        return version("instgenie")
    except PackageNotFoundError:
        return "(not installed)"


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_serve, parser=parser)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL.about)
    about_file = "TOML file with any of these options; --port is port = 8000 there and INSTGENIE_PORT outside"
    parser.add_argument("--config", metavar="FILE", help=about_file)
    add_flags(parser, OPTIONS)


def run_serve(options: argparse.Namespace) -> int:
    config = read_config(vars(options), os.environ)
    from instgenie.server.serve import serve  # brings the web framework

    return serve(config, own_version())
