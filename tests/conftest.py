"""Shared fixtures: tiny pipelines as folders and as models, a server, an event loop.

Tests run on a CPU in float32. The laws also run on a CUDA device where there is one, in float32 and in bfloat16
(`pytest -m gpu` runs only those); `pytest --where cpu-bfloat16` runs the laws there alone. torch and diffusers are
imported by the fixtures that need them, so that tests of plain numbers start at once.
"""

import asyncio
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.clusters import FAULTS, Run
from helpers.names import FAMILIES
from helpers.serving import ALICE, BOB, Running, running_server

import instgenie
from instgenie.cluster import nursery

if TYPE_CHECKING:
    from instgenie.models.model import Model


@dataclass(frozen=True)
class Where:
    """The device and the dtype that a test runs with."""

    device: str
    dtype: str


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--where",
        metavar="DEVICE-DTYPE",
        help="run the laws on this device in this dtype only, for example cpu-bfloat16",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run everything on a CPU in float32, the laws also on a GPU."""
    if "where" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("where")
    is_law = metafunc.function.__name__.startswith("test_law_")
    names = ["cpu-float32", "cuda-float32", "cuda-bfloat16"] if is_law else ["cpu-float32"]
    chosen = [asked] if asked and is_law else names
    metafunc.parametrize("where", [make_where(name) for name in chosen], scope="session")


def make_where(name: str) -> Any:
    marks = [pytest.mark.gpu] if name.startswith("cuda") else []
    return pytest.param(Where(*name.split("-")), marks=marks, id=name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> Iterator[None]:
    """One thread for torch, if any test module has imported it."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder for the tests: none of them reads or writes the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_nursery() -> None:
    """Clusters of all tests share a nursery: the variable that names the test does not matter to it."""
    nursery.LATE.add("PYTEST_CURRENT_TEST")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from helpers.families import save_folders

    return save_folders(tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="session")
def huge_folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose transformer file is 200 GB long, but sparse: it takes no disk space."""
    folder = tmp_path_factory.mktemp("huge") / "pipeline"
    shutil.copytree(folders["fill"], folder)
    num_values = 100_000_000_000
    header = {"weight": {"dtype": "F16", "shape": [num_values], "data_offsets": [0, 2 * num_values]}}
    encoded = json.dumps(header).encode()
    with open(folder / "transformer" / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + 2 * num_values)
    return folder


@pytest.fixture(scope="session")
def models(folders: dict[str, Path], where: Where) -> "dict[str, Model]":
    import torch

    from instgenie.models.loading.load import load

    if where.device == "cuda":
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # no TF32: float32 is the truth here
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    names = {family: str(folder) for family, folder in folders.items()} | {"builtin": "builtin"}
    return {family: load(name, where.device, where.dtype) for family, name in names.items()}


@pytest.fixture(params=[*FAMILIES, "builtin"])
def model(request: pytest.FixtureRequest, models: "dict[str, Model]") -> "Model":
    return models[request.param]


@pytest.fixture(scope="module", name="run")
def make_run() -> Iterator[Run]:
    """Run coroutines in one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the path of worker processes, the same for all clusters, so that one nursery forks them."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(FAULTS))
    return folder


@pytest.fixture(scope="module")
def environment(faults: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(faults), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two keys for all tests that need no settings of their own. Its model suggests prompts."""
    folder = tmp_path_factory.mktemp("server")
    model = shutil.copytree(folders["sd_fill"], folder / "model")
    shutil.copy(Path(instgenie.__file__).parent / "models" / "builtin" / "prompts.json", model)
    names = ["--served-model-name", "tiny", "--served-model-name", "org/tiny"]
    keys = ["--api-key", ALICE, "--api-key", BOB]
    with running_server(folder, str(model), *names, *keys) as running:
        yield running
