"""Options by one name from three places: flags, environment variables, a TOML file. Knows how a value is looked up and
read; not what any option means.

A flag goes before the environment, the environment before the file, the file before the default. The option max-queue
is `--max-queue 64`, `INSTGENIE_MAX_QUEUE=64`, `max-queue = 64`. Unknown names are refused, with the nearest known one.
"""

import argparse
import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instgenie.errors import ConfigError

PREFIX = "INSTGENIE_"
AUTO = "auto"
OTHER_VARIABLES = ["INSTGENIE_CONFIG", "INSTGENIE_LPIPS"]  # the file itself; weights that a metric may use


@dataclass(frozen=True)
class Option:
    name: str
    parse: Callable[[str], Any]  # raises ValueError, whose text says what is expected
    default: Any
    about: str
    metavar: str = "N"
    many: bool = False  # may be given several times; the environment separates by commas
    secret: bool = False  # never shown, not even in an error

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace("-", "_").upper()

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Flags are taken as text and read later, as those of the other places are."""
    for option in options:
        about = option.about.replace("%", "%%")
        if option.parse is flag:
            parser.add_argument(f"--{option.name}", action=argparse.BooleanOptionalAction, default=None, help=about)
        else:
            action = "append" if option.many else "store"
            parser.add_argument(f"--{option.name}", action=action, metavar=option.metavar, help=about)


def read_options(
    options: Sequence[Option], flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Any]:
    """The value of every option, by field name."""
    in_file = read_file(file, options) if file else {}
    check_variables(environment, options)
    return {option.field: find(option, flags, environment, in_file, file) for option in options}


def find(
    option: Option, flags: Mapping[str, Any], environment: Mapping[str, str], in_file: Mapping[str, Any], file: Any
) -> Any:
    if (given := flags.get(option.field)) is not None:
        return read(option, given, f"--{option.name}")
    if (text := environment.get(option.variable)) is not None:
        return read(option, text.split(",") if option.many else text, option.variable)
    if option.name in in_file:
        return read(option, in_file[option.name], f"{option.name} in {file}")
    return option.default


def read(option: Option, given: Any, source: str) -> Any:
    if option.many:
        return tuple(read_one(option, one, source) for one in (given if isinstance(given, list) else [given]))
    return read_one(option, given, source)


def read_one(option: Option, given: Any, source: str) -> Any:
    if isinstance(given, bool):
        given = "true" if given else "false"
    if not isinstance(given, str | int | float):
        raise ConfigError(f"{source} is a {type(given).__name__}: one value is expected")
    text = str(given).strip()
    try:
        return option.parse(text)
    except ValueError as expected:
        shown = "" if option.secret else f" is {text!r}"
        raise ConfigError(f"{source}{shown}: {expected}") from None


def read_file(path: Path, options: Sequence[Option]) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except OSError as failed:
        raise ConfigError(f"the config file {path} cannot be read: {failed.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as broken:
        raise ConfigError(f"the config file {path} is not TOML: {broken}") from None
    known = [option.name for option in options]
    values = {name.replace("_", "-"): value for name, value in found.items()}
    for name in values:
        if name not in known:
            raise ConfigError(f"the config file {path} has an unknown option {name!r}{nearest(name, known)}")
    return values


def check_variables(environment: Mapping[str, str], options: Sequence[Option]) -> None:
    known = [option.variable for option in options] + OTHER_VARIABLES
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}{nearest(name, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f": did you mean {found[0]}?" if found else ""


def text(given: str) -> str:
    if not given:
        raise ValueError("some text is expected")
    return given


def flag(given: str) -> bool:
    if given.lower() not in {"true", "false", "1", "0", "yes", "no"}:
        raise ValueError("true or false is expected")
    return given.lower() in {"true", "1", "yes"}


def whole(low: int, high: int) -> Callable[[str], int]:
    def parse(given: str) -> int:
        if not given.isascii() or not given.isdecimal() or len(given) > 12 or not low <= int(given) <= high:
            raise ValueError(f"a whole number from {low} to {high} is expected")
        return int(given)

    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    def parse(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g} is expected")
        return value

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(given: str) -> str:
        if given not in choices:
            raise ValueError(f"{', '.join(choices[:-1])} or {choices[-1]} is expected")
        return given

    return parse


def auto_or(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_auto(given: str) -> Any:
        if given == AUTO:
            return AUTO
        try:
            return parse(given)
        except ValueError as expected:
            raise ValueError(f"{AUTO}, or {expected}") from None

    return parse_auto
