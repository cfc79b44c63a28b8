"""Options that can be set in three places under one name: a flag, an environment variable, a line of a TOML file. Knows
how a value is found and parsed, not what any option means.

A flag overrides the environment, the environment overrides the file, the file overrides the default. The option
max-queue is `--max-queue 64`, `INSTGENIE_MAX_QUEUE=64` or `max-queue = 64`. Unknown names are refused, with the nearest
known name as a hint; variables that Kubernetes sets for a Service named instgenie are ignored.
"""

import argparse
import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instgenie.errors import ConfigError

PREFIX = "INSTGENIE_"
AUTO = "auto"
OTHER_VARIABLES = ["INSTGENIE_CONFIG", "INSTGENIE_LPIPS"]  # the TOML file; weights of an optional quality metric

# what Kubernetes sets in every container for a Service whose name begins with instgenie; PORT only if it is a URL
SERVICE_VARIABLE = re.compile(
    PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True)
class Option:
    name: str
    parse: Callable[[str], Any]  # raises ValueError with a text that says what is expected
    default: Any
    about: str  # help text, without the default
    metavar: str = "N"
    default_text: str | None = None  # the default in words; None: its value, if it has one
    repeatable: bool = False  # may be given several times; commas separate values in the environment
    secret: bool = False  # never shown, not even in an error

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace("-", "_").upper()

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def help(self) -> str:
        if self.default_text is not None:
            return f"{self.about} (default: {self.default_text})"
        if self.default is None or self.default == ():
            return self.about
        shown = {True: "yes", False: "no"}[self.default] if isinstance(self.default, bool) else f"{self.default}"
        return f"{self.about} (default: {shown.removesuffix('.0')})"


def add_flags(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add a flag per option. Flags stay text here, and are parsed together with the other places by `read_options`."""
    for option in options:
        text = option.help.replace("%", "%%")
        if option.parse is flag:
            parser.add_argument(f"--{option.name}", action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            action = "append" if option.repeatable else "store"
            parser.add_argument(f"--{option.name}", action=action, metavar=option.metavar, help=text)


def read_options(
    options: Sequence[Option], flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Any]:
    """Return the value of every option, by field name."""
    file_values = read_file(file, options) if file else {}
    environment = without_service_variables(environment)
    check_variables(environment, options)
    return {option.field: find_value(option, flags, environment, file_values, file) for option in options}


def find_value(
    option: Option,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file_values: Mapping[str, Any],
    file: Path | None,
) -> Any:
    if (given := flags.get(option.field)) is not None:
        return parse_value(option, given, f"--{option.name}")
    if (text := environment.get(option.variable)) is not None:
        return parse_value(option, text.split(",") if option.repeatable else text, option.variable)
    if option.name in file_values:
        return parse_value(option, file_values[option.name], f"{option.name} in {file}")
    return option.default


def parse_value(option: Option, given: Any, source: str) -> Any:
    if option.repeatable:
        return tuple(parse_one(option, one, source) for one in (given if isinstance(given, list) else [given]))
    return parse_one(option, given, source)


def parse_one(option: Option, given: Any, source: str) -> Any:
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


def without_service_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not is_service_variable(name, value)}


def is_service_variable(name: str, value: str) -> bool:
    if name.startswith(PREFIX) and name.endswith("PORT") and SERVICE_URL.match(value):
        return True
    return SERVICE_VARIABLE.fullmatch(name) is not None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint to append to an error, or an empty string if no known name is similar."""
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


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(given: str) -> int:
        if not given.isascii() or not given.isdecimal() or len(given) > 12 or not low <= int(given) <= high:
            raise ValueError(f"a whole number from {low} to {high} is expected")
        return int(given)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
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
