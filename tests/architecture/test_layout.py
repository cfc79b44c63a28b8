"""The shape of the package: layers, sizes of files and classes, one meaning per class name."""

import ast
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "instgenie"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES, MAX_METHODS, MAX_ROOT_MODULES = 400, 25, 8
FAMILY_CLASSES = ("FluxModel", "UnetModel", "UnetXlModel")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("errors", "from instgenie.cli import main"),  # upwards
        ("models/flux/network", "from instgenie.models.unet.network import predict"),  # into another family
        ("cluster/orders", "import torch"),  # into a process that has no torch
    ],
)
def test_a_forbidden_import_breaks_the_contract(tmp_path: Path, module: str, line: str) -> None:
    shutil.copytree(
        PACKAGE, tmp_path / "instgenie", ignore=shutil.ignore_patterns("builtin", "examples", "__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "instgenie" / f"{module}.py"
    path.write_text(f"{path.read_text()}\n{line}\n")
    linted = lint_imports(tmp_path)
    assert linted.returncode != 0
    assert "BROKEN" in linted.stdout


def test_every_package_has_its_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name.strip() for layer in contracts[0]["layers"] for name in layer.split("|")}
    packages = {f"instgenie.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert layers == packages | {"instgenie.editor", "instgenie.types", "instgenie.errors"}


def test_the_page_of_the_structure_names_every_package() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    missing = [path.parent.name for path in PACKAGE.glob("*/__init__.py") if f"`{path.parent.name}/`" not in page]
    assert missing == []


def test_the_root_is_the_face_alone() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_MODULES


def test_files_are_short() -> None:
    files = [*MODULES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("training/**/*.py")]
    long = {
        str(path.relative_to(ROOT)): num for path in files if (num := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_classes_are_small() -> None:
    counts = {
        f"{path.relative_to(ROOT)}:{found.name}": sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in found.body
        )
        for path in MODULES
        for found in classes(path)
    }
    assert {name: num for name, num in counts.items() if num > MAX_METHODS} == {}


def test_a_class_name_means_one_thing() -> None:
    names = Counter(found.name for path in MODULES for found in classes(path))
    assert [name for name, num in names.items() if num > 1] == []


def test_only_models_ask_which_family_a_model_is_of() -> None:
    outside = [path for path in MODULES if not path.is_relative_to(PACKAGE / "models")]
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in outside
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if any(name in ast.unparse(node) for name in FAMILY_CLASSES)
    ]
    assert asked == []
