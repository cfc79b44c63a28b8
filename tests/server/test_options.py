"""Options: one name, three places to set it, one order of precedence."""

import argparse
from pathlib import Path

import pytest

from instgenie.errors import ConfigError
from instgenie.server.options import Option, add_flags, auto_or, flag, number, one_of, read_options, text, whole_number

OPTIONS = (
    Option("port", whole_number(0, 65535), 8000, "a port"),
    Option("max-queue", auto_or(whole_number(1, 9)), "auto", "a limit"),
    Option("name", text, (), "names", "NAME", repeatable=True),
    Option("reuse", flag, True, "a switch"),
    Option("how", one_of("this", "that"), "this", "a choice"),
    Option("share", number(0, 1), 0.5, "a share"),
    Option("key", whole_number(0, 9), 0, "a secret", secret=True),
)


def read(
    arguments: list[str], environment: dict[str, str] | None = None, file: Path | None = None
) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser, OPTIONS)
    return read_options(OPTIONS, vars(parser.parse_args(arguments)), environment or {}, file)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text('port = 1\nmax_queue = 2\nname = ["a", "b"]\nreuse = false\nhow = "that"\nshare = 1\n')
    return path


def test_defaults() -> None:
    expected = {"port": 8000, "max_queue": "auto", "name": (), "reuse": True, "how": "this", "share": 0.5, "key": 0}
    assert read([]) == expected


def test_the_file_overrides_the_default(toml: Path) -> None:
    expected = {"port": 1, "max_queue": 2, "name": ("a", "b"), "reuse": False, "how": "that", "share": 1.0, "key": 0}
    assert read([], {}, toml) == expected


def test_the_environment_overrides_the_file(toml: Path) -> None:
    found = read([], {"INSTGENIE_PORT": "7", "INSTGENIE_NAME": "x,y", "INSTGENIE_REUSE": "yes", "PATH": "z"}, toml)
    assert (found["port"], found["max_queue"], found["name"], found["reuse"]) == (7, 2, ("x", "y"), True)


def test_a_flag_overrides_the_environment(toml: Path) -> None:
    environment = {"INSTGENIE_PORT": "7", "INSTGENIE_REUSE": "true"}
    found = read(["--port", "9", "--no-reuse", "--name", "p", "--name", "q"], environment, toml)
    assert (found["port"], found["reuse"], found["name"]) == (9, False, ("p", "q"))


SERVICE = {
    "INSTGENIE_SERVICE_HOST": "10.0.171.239",
    "INSTGENIE_SERVICE_PORT": "8000",
    "INSTGENIE_SERVICE_PORT_HTTP": "8000",
    "INSTGENIE_PORT": "tcp://10.0.171.239:8000",
    "INSTGENIE_PORT_8000_TCP": "tcp://10.0.171.239:8000",
    "INSTGENIE_PORT_8000_TCP_PROTO": "tcp",
    "INSTGENIE_PORT_8000_TCP_PORT": "8000",
    "INSTGENIE_PORT_8000_TCP_ADDR": "10.0.171.239",
}


@pytest.mark.parametrize("service", ["INSTGENIE", "INSTGENIE_EDIT", "INSTGENIE_MAX_QUEUE"])
def test_variables_that_kubernetes_sets_for_a_service_are_ignored(service: str) -> None:
    injected = {name.replace("INSTGENIE", service): value for name, value in SERVICE.items()}
    assert read([], injected | {"INSTGENIE_SHARE": "1"}) == read(["--share", "1"])
    assert read([], injected | {"INSTGENIE_PORT": "9000"})["port"] == 9000


@pytest.mark.parametrize("name", ["INSTGENIE_SERVICE", "INSTGENIE_PORTS", "INSTGENIE_PORT_8000", "INSTGENIE_MY_PORT"])
def test_other_variables_are_not_taken_for_those_of_kubernetes(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown environment variable {name}"):
        read([], {name: "8000"})


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["--port", "65536"], {}, "--port is '65536': a whole number from 0 to 65535"),
        (["--port", "-1"], {}, "from 0 to 65535"),
        ([], {"INSTGENIE_PORT": "x"}, "INSTGENIE_PORT is 'x'"),
        ([], {"INSTGENIE_PROT": "1"}, "unknown environment variable INSTGENIE_PROT: did you mean INSTGENIE_PORT?"),
        (["--max-queue", "many"], {}, "auto, or a whole number from 1 to 9"),
        (["--how", "so"], {}, "this or that is expected"),
        (["--share", "nan"], {}, "a number from 0 to 1"),
        (["--name", " "], {}, "some text is expected"),
        ([], {"INSTGENIE_REUSE": "perhaps"}, "true or false"),
    ],
)
def test_bad_values(arguments: list[str], environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(arguments, environment)
    assert expected in str(refused.value)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        read(["--key", "hunter2"])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("prot = 1", "unknown option 'prot': did you mean port?"),
        ("[port]\nx = 1", "is a dict: one value is expected"),
        ("port =", "is not TOML"),
        ("zzzzzz = 1", "unknown option 'zzzzzz'"),
    ],
)
def test_bad_files(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read([], {}, path)
    assert expected in str(refused.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read([], {}, tmp_path / "none.toml")
