"""Bad input of every kind: one line that names it, and nothing left behind. Help needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import EDIT, edit_here, instgenie_process, names

BAD_EDITS = {
    "no photograph": (["missing.jpg"], "no such file"),
    "a folder": (["."], "not a file"),
    "not a picture": (["text.png"], "PNG, JPEG or WebP"),
    "cut short": (["cut.jpg"], "damaged or cut short"),
    "huge picture": (["huge.png"], "9000x8000"),
    "tiny picture": (["tiny.png"], "8x8"),
    "no mask file": (["photo.jpg", "--mask", "missing.png"], "no such file"),
    "mask is not a picture": (["photo.jpg", "--mask", "text.png"], "PNG, JPEG or WebP"),
    "mask of another size": (["photo.jpg", "--mask", "other.png"], "101x60"),
    "empty mask": (["photo.jpg", "--mask", "empty.png"], "empty"),
    "mask without alpha": (["photo.jpg", "--mask", "luma.png", "--mask-mode", "alpha"], "luma"),
    "box outside": (["photo.jpg", "--box", "90,0,20,20"], "100x60"),
    "empty box": (["photo.jpg", "--box", "0,0,0,20"], "empty"),
    "box of three": (["photo.jpg", "--box", "1,2,3"], "x,y,width,height"),
    "mask and box": (["photo.jpg", "--box", "0,0,5,5", "--mask", "alpha.png"], "not allowed with"),
    "size of no multiple": (["photo.jpg", "--size", "250x256"], "250"),
    "size too large": (["photo.jpg", "--size", "16x99999"], "99999"),
    "size in words": (["photo.jpg", "--size", "large"], "WIDTHxHEIGHT"),
    "no steps": (["photo.jpg", "--steps", "0"], "from 1 to 1000"),
    "steps in words": (["photo.jpg", "--steps", "many"], "many"),
    "negative seed": (["photo.jpg", "--seed=-1"], "-1"),
    "endless guidance": (["photo.jpg", "--guidance", "inf"], "inf"),
    "no strength": (["photo.jpg", "--strength", "0"], "strength"),
    "wide feather": (["photo.jpg", "--feather", "10000"], "10000"),
    "long prompt": (["photo.jpg", "--prompt", "x" * 32001], "32,001"),
    "unknown suffix": (["photo.jpg", "-o", "out.gif"], ".png"),
    "no output folder": (["photo.jpg", "-o", "missing/out.png"], "no folder"),
    "over the photograph": (["photo.jpg", "-o", "./photo.jpg"], "not be overwritten"),
    "over the mask": (["photo.jpg", "--mask", "alpha.png", "-o", "alpha.png"], "not be overwritten"),
}


@pytest.mark.parametrize("name", BAD_EDITS)
def test_bad_input_is_one_line_and_leaves_nothing(desk: Path, name: str) -> None:
    arguments, message = BAD_EDITS[name]
    before = names(desk)
    done = instgenie_process("edit", "--prompt", "a red cat", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert names(desk) == before


def broken_model(folders: dict[str, Path], kind: str, at: Path) -> str:
    if kind == "no folder":
        return "missing"
    at.mkdir()
    if kind == "no index":
        return str(at)
    for path in folders["fill"].rglob("*"):
        if path.is_file():
            target = at / path.relative_to(folders["fill"])
            target.parent.mkdir(exist_ok=True, parents=True)
            target.write_bytes(path.read_bytes())
    [weights] = (at / "transformer").glob("*.safetensors")
    if kind == "no safetensors":
        weights.rename(weights.with_suffix(".bin"))
    elif kind == "torn safetensors":
        weights.write_bytes(weights.read_bytes()[:1000])
    return str(at)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no folder", "unknown model 'missing'"),
        ("no index", "model_index.json"),
        ("no safetensors", "safetensors"),
        ("torn safetensors", "1,000 bytes"),
    ],
)
def test_bad_models_are_one_line_and_leave_nothing(
    desk: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str], kind: str, message: str,
) -> None:  # fmt: skip
    model = broken_model(folders, kind, tmp_path_factory.mktemp("models") / "broken")
    before = names(desk)
    assert edit_here("--model", model) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert names(desk) == before


def test_an_unknown_model_in_a_process(desk: Path) -> None:
    done = instgenie_process("edit", "photo.jpg", *EDIT, "--model", "missing")
    assert done.returncode == 2
    assert "unknown model 'missing'" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_is_one_line(desk: Path, huge_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert edit_here("--model", str(huge_folder)) == 2
    assert "needs 372.5 GiB" in capsys.readouterr().err


def test_unknown_devices_are_named(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert edit_here("--model", str(folders["fill"]), "--device", "abacus") == 2
    assert "abacus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["edit", "--help"], 0),
        (["register", "--help"], 0),
        (["bench", "edit", "--help"], 0),
        (["bench", "table", "--help"], 0),
        (["calibrate", "--help"], 0),
        (["--version"], 0),
        ([], 2),
    ],
)
def test_help_and_version(arguments: list[str], code: int) -> None:
    done = instgenie_process(*arguments)
    assert done.returncode == code
    assert "instgenie" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_help_of_every_command_needs_no_torch() -> None:
    check = (
        "import sys\n"
        "from instgenie.cli import COMMANDS, main\n"
        "from instgenie.cli.bench import BENCHES\n"
        "for command in [[], *([name] for name in COMMANDS), *(['bench', name] for name in BENCHES)]:\n"
        "    try:\n"
        "        main([*command, '--help'])\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: instgenie") == 1 + 7 + 18


def test_bad_input_does_not_wait_for_torch(desk: Path) -> None:
    check = (
        "import sys; from instgenie.cli import main; code = main(['edit', 'text.png', '--prompt', 'x']); "
        "sys.exit(0 if code == 2 and not {'torch', 'diffusers', 'transformers'} & set(sys.modules) else 1)"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, check=False).returncode == 0
