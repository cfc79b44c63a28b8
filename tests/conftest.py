"""Shared fixtures: tiny pipelines as folders and as models, a server, an event loop.

Tests run on a CPU in float32. The laws also run on a CUDA device, in float32 and in bfloat16 (`pytest -m gpu` runs only
those); without one they are not collected for it. `pytest --where cpu-bfloat16` runs the laws there alone. torch and
diffusers are imported by the fixtures that need them, so that tests of plain numbers start at once.
"""

import asyncio
import gc
import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.clusters import FAULTS, QUIRK, Run
from helpers.names import FAMILIES, SHORT
from helpers.serving import ALICE, BOB, Running, running_server

import instgenie
from instgenie.cluster import nursery

FORK_FOLDER, FORK_PARENT = "TESTS_FORK_FOLDER", "TESTS_FORK_PARENT"
RAY_FOLDER = "tests/cluster/ray/"

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


def pytest_configure(config: pytest.Config) -> None:
    """Let the nurseries and commands that tests start be forked (`helpers/forkserver`). Processes of pytest-xdist share
    what the first one has set."""
    if sys.platform != "linux" or FORK_FOLDER in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="instgenie-tests-")
    config.add_cleanup(folder.cleanup)
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setenv(FORK_FOLDER, folder.name)
    patch.setenv(FORK_PARENT, str(os.getpid()))
    patch.setenv("PYTHONPATH", str(Path(__file__).parent / "helpers" / "forkserver"), prepend=os.pathsep)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage while all tests and what they use are imported, nor among it later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 20, 20)  # the laws take a twentieth less time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With one file per process of pytest-xdist, let the files that share a Ray cluster go to the same one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class RayTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return RAY_FOLDER if file.startswith(RAY_FOLDER) else file

    return RayTogether(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run everything on a CPU in float32, the laws also on a GPU if there is one: to skip thousands takes a while."""
    if "where" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("where")
    is_law = metafunc.function.__name__.startswith("test_law_")
    names = ["cpu-float32", "cuda-float32", "cuda-bfloat16"] if is_law and has_cuda() else ["cpu-float32"]
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


@cache
def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def small_matrices() -> Iterator[None]:
    """If any test module has imported torch: one thread, and products without oneDNN, which takes several times as long
    for the small matrices of tests. So do the processes that the fork server of the tests forks; others use it."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    yield
    torch.set_num_threads(before[0])
    torch.backends.mkldnn.enabled = before[1]


@pytest.fixture(autouse=True)
def no_tf32() -> None:
    """Before each test: float32 products on a GPU are exact, whatever another test or a library has set."""
    if "torch" in sys.modules and has_cuda():
        import torch

        torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"


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
    from helpers.families import shorten

    from instgenie.models.flux.model import is_flux
    from instgenie.models.loading.load import load

    names = {family: str(folder) for family, folder in folders.items()} | {"builtin": "builtin"}
    loaded = {family: load(name, where.device, where.dtype) for family, name in names.items()}
    builtin = loaded["builtin"]
    assert is_flux(builtin)
    return loaded | {SHORT: shorten(builtin)}


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
    """A file that worker processes run, the same for all clusters, so that one nursery forks them."""
    file = tmp_path_factory.mktemp("faults") / "faults.py"
    file.write_text(textwrap.dedent(FAULTS))
    return file


@pytest.fixture(scope="module")
def environment(faults: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(QUIRK, str(faults))
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
