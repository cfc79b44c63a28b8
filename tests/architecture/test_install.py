"""What a machine needs to edit and to serve: the package's dependencies, and none of the developers' tools."""

import ast
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {"opentelemetry", "ray", "triton"}  # two extras; there with torch on machines with GPUs


def plan(target: str, folder: Path) -> str:
    """The commands that make would run in a new clone."""
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return subprocess.run(["make", "--dry-run", target], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["serve", "demo", "report"])
def test_running_installs_no_tools_of_developers(target: str, tmp_path: Path) -> None:
    commands = plan(target, tmp_path).splitlines()
    installs = [line for line in commands if "pip install" in line]
    assert [line.split()[-1] for line in installs] == ["torch==2.13.0", "."]
    assert any("-m venv" in line for line in commands)


@pytest.mark.parametrize("target", ["check", "test", "format", "screenshots"])
def test_developing_installs_the_tools(target: str, tmp_path: Path) -> None:
    installs = [line for line in plan(target, tmp_path).splitlines() if "pip install" in line]
    assert [line.split()[-1].strip("'") for line in installs] == ["torch==2.13.0", ".[dev]"]


def closure(names: list[str]) -> set[str]:
    """The distributions with these requirements, and all that they require on this machine."""
    found, waiting = set[str](), names
    while waiting:
        needed = Requirement(waiting.pop())
        name = canonicalize_name(needed.name)
        if name not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += requires(name) or []
    return found


def imported(path: Path) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"instgenie"}


def test_the_package_imports_only_what_it_requires() -> None:
    """Measuring quality needs an extra of its own, and says so."""
    known, needed = packages_distributions(), closure(PROJECT["dependencies"])
    for path in sorted((ROOT / "instgenie").rglob("*.py")):
        if "bench" not in path.parts:
            for name in imported(path) - OPTIONAL:
                owners = {canonicalize_name(owner) for owner in known.get(name, ())}
                assert owners & needed, f"{path.relative_to(ROOT)} imports {name}, which is not required"


def test_only_the_launcher_on_ray_imports_ray() -> None:
    users = [path for path in (ROOT / "instgenie").rglob("*.py") if "ray" in imported(path)]
    assert users
    assert {path.parent.relative_to(ROOT) for path in users} == {Path("instgenie/cluster/ray")}


def test_a_server_without_a_cluster_does_not_import_ray() -> None:
    code = "import sys, instgenie.cli, instgenie.server.serve; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
