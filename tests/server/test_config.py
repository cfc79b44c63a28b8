"""Options of `instgenie serve` become one configuration."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from instgenie.cli import main
from instgenie.errors import ConfigError
from instgenie.server import config as server_config
from instgenie.server.config import ServeConfig, choose_cache_dtype, choose_devices, read_config
from instgenie.server.guidance_options import pair_devices


def read(environment: dict[str, str] | None = None, **flags: Any) -> ServeConfig:
    return read_config(flags, environment or {})


def test_defaults_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_config, "count_gpus", lambda: 0)
    config = read()
    assert (config.cluster.model, config.cluster.devices) == ("builtin", ("cpu",))
    assert (config.http.host, config.http.port, config.http.served_model_names) == ("127.0.0.1", 8000, ("builtin",))
    assert config.http.max_pixels == 40_000_000
    with pytest.raises(FrozenInstanceError):
        config.http.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("device", "num_workers", "num_gpus", "expected"),
    [
        ("auto", "auto", 0, ("cpu",)),
        ("auto", 3, 0, ("cpu",) * 3),
        ("auto", "auto", 2, ("cuda:0", "cuda:1")),
        ("cuda", 3, 2, ("cuda:0", "cuda:1", "cuda:0")),
        ("cuda:1", 2, 2, ("cuda:1", "cuda:1")),
        ("cpu", "auto", 2, ("cpu",)),
        ("cuda", "auto", 0, ("cuda",)),
    ],
)
def test_devices(
    device: str, num_workers: int | str, num_gpus: int, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_config, "count_gpus", lambda: num_gpus)
    assert choose_devices(device, num_workers) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (("cpu",), "model"),
        (("cuda",), "int4"),
        (("cuda:1",), "int4"),
        (("cpu", "cuda:0"), "int4"),
        (("cpu", "cpu"), "model"),
    ],
)
def test_all_workers_keep_activations_in_one_dtype(devices: tuple[str, ...], expected: str) -> None:
    assert choose_cache_dtype("auto", devices) == expected
    assert choose_cache_dtype("model", devices) == "model"
    assert choose_cache_dtype("fp8", devices) == "fp8"


@pytest.mark.parametrize(
    ("flags", "num_gpus", "expected"),
    [
        ({}, 0, "model"),
        ({}, 2, "int4"),
        ({"device": "cpu"}, 2, "model"),
        ({"cache_dtype": "auto"}, 1, "int4"),
        ({"cache_dtype": "model"}, 1, "model"),
        ({"cache_dtype": "fp8"}, 0, "fp8"),
    ],
)
def test_the_dtype_of_activations_suits_the_devices(
    flags: dict[str, str], num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_config, "count_gpus", lambda: num_gpus)
    assert read(**flags).cluster.cache.dtype == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"host_cache_gib": "auto"}, None),
        ({"host_cache_gib": "1.5"}, 3 * 2**29),
        ({"host_cache_gib": "0"}, 0),
    ],
)
def test_memory_for_activations(flags: dict[str, str], expected: int | None) -> None:
    """The cluster resolves None."""
    assert read(**flags).cluster.cache.host_bytes == expected


def test_what_is_kept_and_how_long_a_worker_may_be_silent() -> None:
    default = read(device="cpu").cluster
    assert (default.auto_register, default.cache.seconds_to_live, default.worker_timeout) == (True, None, 120.0)
    chosen = read(device="cpu", auto_register=False, cache_ttl="1.5", worker_timeout="600").cluster
    assert (chosen.auto_register, chosen.cache.seconds_to_live, chosen.worker_timeout) == (False, 5400.0, 600.0)


def test_keys_come_from_flags_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\n two \n")
    config = read({"INSTGENIE_API_KEY_FILE": str(tmp_path / "keys")}, api_key=["zero"])
    assert [key.secret for key in config.http.api_keys] == ["zero", "one", "two"]
    assert "zero" not in repr(config)


def test_keys_of_a_file_may_have_names(tmp_path: Path) -> None:
    """A key given as a flag is taken as it is: it may have a colon."""
    (tmp_path / "keys").write_text("alice:one\nalice: two\nthree\n:fo:ur\nbob:fi:ve\n")
    config = read(api_key=["zero:0"], api_key_file=str(tmp_path / "keys"))
    found = [(key.name, key.secret) for key in config.http.api_keys]
    named = [("alice", "one"), ("alice", "two"), (None, "three"), (None, "fo:ur"), ("bob", "fi:ve")]
    assert found == [(None, "zero:0"), *named]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("alice:", "line 1: a key is expected after alice:"),
        ("one\n\nthe boss:hunter2", "line 3: the name before the colon has up to 64 letters"),
        ("alice:hunter2\nbob:hunter2", "one API key is given twice, with 'alice' and 'bob'"),
        ("hunter2\nbob:hunter2", "one API key is given twice, with 'bob' and 'no name'"),
        ("bob:flag", "one API key is given twice, with 'bob' and 'no name'"),
    ],
)
def test_keys_that_cannot_be_told_apart_are_refused(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError) as refused:
        read(api_key=["flag"], api_key_file=str(tmp_path / "keys"))
    assert expected in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("content", [None, "\n \n"])
def test_an_unusable_key_file_is_refused(content: str | None, tmp_path: Path) -> None:
    """A server that should have keys never starts without any."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="API key file"):
        read(api_key_file=str(path))


def test_a_folder_is_served_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert read(model=str(tmp_path / "my-model")).http.served_model_names == ("my-model",)
    assert read(model=str(tmp_path), served_model_name=["a", "b"]).http.served_model_names == ("a", "b")


def test_the_config_file_by_flag_and_by_environment(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('model = "dummy:sd2.1"\nmax-queue = 5\n')
    for config in (read(config=str(path)), read({"INSTGENIE_CONFIG": str(path)})):
        assert (config.cluster.model, config.cluster.max_queue) == ("dummy:sd2.1", 5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prot", "1"], "did you mean --port?"),
        (["--port", "x"], "--port is 'x'"),
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--batching", "none"], "continuous, static, static-pipelined or naive"),
        (["--host-cache-gib", "much"], "auto, or a number from 0 to 65536"),
        (["--cache-dtype", "int3"], "auto, model, fp8 or int4"),
    ],
)
def test_bad_arguments_end_with_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["serve", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    shown = capsys.readouterr().err
    assert (code, len(shown.splitlines())) == (2, 1)
    assert expected in shown


def test_workers_form_pairs_for_guidance_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_config, "count_gpus", lambda: 4)
    config = read(guidance_parallel=True).cluster
    assert (config.devices, config.guidance_devices) == (("cuda:0", "cuda:2"), ("cuda:1", "cuda:3"))
    assert read().cluster.guidance_devices == ()
    on_cpu = read(guidance_parallel=True, device="cpu", workers=2).cluster
    assert (on_cpu.devices, on_cpu.guidance_devices) == (("cpu",), ("cpu",))
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"workers": 3}, "an even number of workers is expected, not 3"),
        ({"device": "cuda:1", "workers": 2}, "not cuda:1 twice"),
    ]
    for flags, message in refusals:
        with pytest.raises(ConfigError, match=message):
            read(guidance_parallel=True, **flags)
    with pytest.raises(ConfigError, match="each worker has one device"):
        pair_devices({"guidance_parallel": True, "cluster": "auto"}, ("cpu", "cpu"))
