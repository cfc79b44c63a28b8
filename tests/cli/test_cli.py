"""The command line as its users meet it: real files, real processes, bad input of every kind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

import instgenie.cli.edit
from instgenie.cli import main
from instgenie.editor import Editor
from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import open_picture


@pytest.fixture
def desk(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a photograph and masks of it, and an empty cache elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    noise = np.random.default_rng(0).integers(0, 256, (60, 100, 3), np.uint8)
    Image.fromarray(noise).save("photo.jpg")
    mask = box_mask((20, 10, 40, 30), (60, 100))
    Image.fromarray(mask).save("luma.png")
    Image.fromarray(np.dstack([noise, np.where(mask, 0, 255).astype(np.uint8)])).save("alpha.png")
    Image.new("RGBA", (100, 60), "white").save("empty.png")
    Image.new("RGBA", (101, 60), (0, 0, 0, 0)).save("other.png")
    Image.new("1", (9000, 8000)).save("huge.png")
    Image.new("RGB", (8, 8)).save("tiny.png")
    Path("text.png").write_text("not a picture")
    Path("cut.jpg").write_bytes(Path("photo.jpg").read_bytes()[:2000])
    return tmp_path


def instgenie_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "instgenie", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


EDIT = ["--prompt", "a red cat", "--size", "48x32", "--steps", "3"]


def test_edit_in_a_process(desk: Path, folders: dict[str, Path]) -> None:
    before = Path("photo.jpg").read_bytes()
    model = str(folders["fill"])
    done = instgenie_process("edit", "photo.jpg", "--mask", "alpha.png", "--model", model, "--seed", "7", *EDIT)
    assert (done.returncode, Path("photo.jpg").read_bytes()) == (0, before), done.stderr
    photo, edited = open_picture("photo.jpg"), open_picture("photo.edit.png")
    mask = box_mask((20, 10, 40, 30), (60, 100))
    assert np.array_equal(edited[~mask], photo[~mask])
    assert not np.array_equal(edited[mask], photo[mask])
    for fact in ("100x60", "48x32", "tokens", "seconds", "7", "photo.edit.png"):
        assert fact in done.stdout
    assert "3/3" in done.stderr
    assert "Loading" not in done.stderr


def edit_here(*arguments: str) -> int:
    return main(["edit", "photo.jpg", "--device", "cpu", *EDIT, *arguments])


def test_masks_of_every_kind_edit_the_same_pixels(desk: Path, folders: dict[str, Path]) -> None:
    model = ["--model", str(folders["fill"]), "--no-cache"]
    assert edit_here(*model, "--mask", "alpha.png", "-o", "alpha.webp") == 0
    assert edit_here(*model, "--mask", "luma.png", "--mask-mode", "luma", "-o", "luma.webp") == 0
    assert edit_here(*model, "--box", "20,10,40,30", "-o", "box.webp") == 0
    alpha = open_picture("alpha.webp")
    assert np.array_equal(alpha, open_picture("luma.webp"))
    assert np.array_equal(alpha, open_picture("box.webp"))


def test_no_mask_is_the_whole_picture(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(folders["blend_guided"])]
    assert edit_here(*model, "--true-guidance", "2", "--negative-prompt", "a dog", "--strength", "0.7") == 0
    assert "100%" in capsys.readouterr().out


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
    "mask without alpha": (["photo.jpg", "--mask", "luma.png"], "luma"),
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


def test_an_interrupt_ends_with_130(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(instgenie.cli.edit, "open_picture", interrupted)
    assert edit_here() == 130


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["edit", "--help"], 0),
        (["register", "--help"], 0),
        (["bench", "edit", "--help"], 0),
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


def test_bad_input_does_not_wait_for_torch(desk: Path) -> None:
    check = (
        "import sys; from instgenie.cli import main; code = main(['edit', 'text.png', '--prompt', 'x']); "
        "sys.exit(0 if code == 2 and not {'torch', 'diffusers', 'transformers'} & set(sys.modules) else 1)"
    )
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, check=False).returncode == 0


def cached_files() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.safetensors"))


def test_the_second_edit_of_a_photograph_hits(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(folders["fill"]), "--box", "20,10,40,30"]
    assert edit_here(*model) == 0
    first = capsys.readouterr()
    assert "cache    miss" in first.out
    assert "computed 24 of 24 tokens" in first.out
    assert "registering" in first.err
    assert edit_here(*model, "--prompt", "a blue dog", "--seed", "3", "--strength", "0.7", "--quality", "fast") == 0
    second = capsys.readouterr()
    assert "cache    hit (disk)" in second.out
    assert "computed 9 of 24 tokens" in second.out
    assert "load 0." in second.out
    assert "registering" not in second.err
    assert edit_here(*model, "--no-cache") == 0
    off = capsys.readouterr()
    assert "cache    off" in off.out
    assert "computed 24 of 24 tokens" in off.out


def test_registering_where_it_cannot_help_is_left_out(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(folders["fill"])]
    assert edit_here(*model) == 0
    assert "cache    not asked: nothing to reuse" in capsys.readouterr().out
    assert edit_here(*model, "--box", "20,10,40,30", "--no-register") == 0
    assert "cache    miss" in capsys.readouterr().out
    assert cached_files() == []


REGISTER = ["register", "photo.jpg", "--device", "cpu", "--size", "48x32", "--steps", "3"]


def test_register_then_edit(desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(folders["sdxl"]), "--cache-dir", "kept"]
    assert main([*REGISTER, *model, "--size", "64x32", "--kind", "y"]) == 0
    printed = capsys.readouterr()
    assert "registered 3 of 3 steps" in printed.out
    assert "in kept" in printed.out
    assert "3/3" in printed.err
    assert main([*REGISTER, *model, "--size", "64x32", "--kind", "y"]) == 0
    assert "already registered: 3 steps" in capsys.readouterr().out
    assert edit_here(*model, "--size", "64x32", "--box", "20,10,40,30") == 0
    assert "cache    hit (disk)" in capsys.readouterr().out
    assert cached_files() == []


def test_a_registration_without_room_is_one_line(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--model", str(folders["fill"]), "--cache-gib", "0.0000001"]
    assert main([*REGISTER, *small]) == 2
    assert "has no room for" in capsys.readouterr().err
    assert edit_here(*small, "--box", "20,10,40,30") == 0
    assert "not registered: " in capsys.readouterr().err
    assert Path("photo.edit.png").is_file()
    assert cached_files() == []


def test_an_interrupt_while_registering_leaves_the_edit(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Editor, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Editor, "register", interrupted)
    assert edit_here("--model", str(folders["fill"]), "--box", "20,10,40,30") == 0
    assert "registering was interrupted" in capsys.readouterr().err
    assert Path("photo.edit.png").is_file()


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    with safe_open(path, framework="np") as file:
        return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def test_a_damaged_cache_is_a_miss_that_mends_itself(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["--model", str(folders["fill"]), "--box", "20,10,40,30", "--steps", "6"]
    assert edit_here(*arguments) == 0
    [first, second] = cached_files()
    inode, content = first.stat().st_ino, read_tensors(second)
    damaged = bytearray(second.read_bytes())
    damaged[-1] ^= 1
    second.write_bytes(damaged)
    capsys.readouterr()
    assert edit_here(*arguments) == 0
    assert "cache    miss" in capsys.readouterr().out
    assert "checksum is wrong" in caplog.text
    assert [first, second] == cached_files()
    assert (first.stat().st_ino, read_tensors(second)) == (inode, content)
    assert edit_here(*arguments) == 0
    assert "cache    hit (disk)" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["edit", "register"])
def test_cache_folders_that_are_none(command: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = EDIT if command == "edit" else []
    assert main([command, "photo.jpg", *prompt, "--cache-dir", "text.png"]) == 2
    assert "text.png cannot be a cache folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([command, "photo.jpg", *prompt, "--cache-gib", "-1"])
    assert "'-1' is not a number of GiB" in capsys.readouterr().err


def test_an_edit_does_without_the_users_cache_folder(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(desk / "text.png"))
    assert edit_here("--model", str(folders["fill"]), "--box", "20,10,40,30") == 0
    printed = capsys.readouterr()
    assert "no cache: " in printed.err
    assert "cache    off" in printed.out


def test_a_killed_registration_goes_on_and_comes_to_the_same(desk: Path, folders: dict[str, Path]) -> None:
    """To the last bit in processes of the same kind: how many threads share a sum decides how it is rounded."""
    arguments = ["register", "photo.jpg", "--model", str(folders["sdxl"]), "--size", "96x64", "--steps", "32"]
    assert "registered 32 of 32 steps" in run_alone(*arguments, "--cache-dir", "whole")
    killed = kill_registration(*arguments, "--cache-dir", "killed")
    num_left = 32 - 4 * len(killed)
    assert 0 < num_left < 32
    assert f"registered {num_left} of 32 steps" in run_alone(*arguments, "--cache-dir", "killed")
    assert all(path.stat().st_ino == inode for path, inode in killed.items())
    whole, resumed = (
        {path.name: read_tensors(path) for path in Path(folder).glob("*/*.safetensors")}
        for folder in ("whole", "killed")
    )
    assert len(whole) == 8
    assert whole == resumed
    assert {path.suffix for path in Path("killed").glob("*/*")} == {".safetensors", ""}


def start_alone(*arguments: str) -> subprocess.Popen[str]:
    """Our command in a process of its own, with one thread."""
    command, environment = [sys.executable, "-m", "instgenie", *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def run_alone(*arguments: str) -> str:
    with start_alone(*arguments) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0
    return printed


def kill_registration(*arguments: str) -> dict[Path, int]:
    """Kills it when it has stored a few spans; the files that are there then, and their inodes."""
    with start_alone(*arguments) as process:
        while len(list(Path("killed").glob("*/*.safetensors"))) < 3:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    return {path: path.stat().st_ino for path in Path("killed").glob("*/*.safetensors")}


@pytest.mark.parametrize("family", ["blend_guided", "fill", "sd", "sdxl", "sd_fill"])
def test_bench_edit_prints_and_writes_its_rows(
    family: str, desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(folders[family]), "--device", "cpu", "--size", "48x32", "--json", "bench.json"]
    assert main(["bench", "edit", *model, "--steps", "2", "--repeats", "2", "--batch", "1", "--batch", "3"]) == 0
    report = json.loads(Path("bench.json").read_text())
    assert [row["system"] for row in report["rows"]] == ["diffusers", "dense", "cached"] * 4
    assert [row["kind"] for row in report["rows"]] == [None, None, "kv"] * 4
    assert [row["batch"] for row in report["rows"]] == ([1] * 3 + [3] * 3) * 2
    assert [row["mask_ratio"] for row in report["rows"]] == pytest.approx([1] * 6 + [0.2] * 6, abs=0.05)
    assert all(row["step_ms"] > 0 for row in report["rows"])
    assert {"device", "torch", "cuda", "diffusers", "kernels"} < set(report["machine"])
    assert "1.00x" in capsys.readouterr().out


def test_bench_edit_measures_what_it_is_asked_for(desk: Path, folders: dict[str, Path]) -> None:
    given = ["--model", str(folders["blend"]), "--device", "cpu", "--size", "48x32", "--json", "bench.json"]
    asked = ["--system", "cached", "--kind", "y", "--kind", "kv", "--mask-ratio", "0.3", "--no-kernels", "--no-graphs"]
    assert main(["bench", "edit", *given, *asked, "--steps", "1", "--repeats", "1"]) == 0
    report = json.loads(Path("bench.json").read_text())
    assert [(row["system"], row["kind"]) for row in report["rows"]] == [("cached", "y"), ("cached", "kv")]
    assert report["machine"]["kernels"] == "off"


def test_bench_edit_measures_tiers_policies_and_storage(desk: Path, folders: dict[str, Path]) -> None:
    given = ["--model", str(folders["sdxl"]), "--device", "cpu", "--size", "64x64", "--json", "bench.json"]
    asked = ["--tier", "gpu", "--tier", "host", "--policy", "naive", "--policy", "exact", "--cache-dtype", "fp8"]
    asked += ["--system", "cached", "--mask-ratio", "0.3", "--rows", "whole"]
    assert main(["bench", "edit", *given, *asked, "--steps", "2", "--repeats", "1"]) == 0
    rows = json.loads(Path("bench.json").read_text())["rows"]
    assert {(row["kind"], row["cache_dtype"]) for row in rows} == {("kv", "fp8")}
    assert [(row["tier"], row["policy"]) for row in rows] == [("gpu", "cached"), ("host", "naive"), ("host", "exact")]


def test_bench_pipeline_draws_what_it_measures(
    desk: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(folders["sdxl"]), "--device", "cpu", "--size", "64x64", "--kind", "y", "--batch", "2"]
    files = ["--timeline", "out.html", "--trace", "out.json"]
    assert main(["bench", "pipeline", *given, *files, "--policy", "naive", "--policy", "cached"]) == 0
    page, trace = Path("out.html").read_text(), json.loads(Path("out.json").read_text())
    assert page.count("<svg") == 2
    assert "block 5, cached" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing from elsewhere
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {bar["pid"] for bar in bars} == {0, 1}
    for policy in (0, 1):
        loads = [bar for bar in bars if bar["pid"] == policy and bar["cat"] == "load"]
        assert len(loads) == 12  # eight blocks, and what left the four transformers
    out = capsys.readouterr().out
    assert "naive" in out
    assert "out.html" in out


def test_bench_pipeline_needs_a_folder_for_its_page(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--timeline", "missing/out.html"]) == 2
    assert "no folder missing" in capsys.readouterr().err


@pytest.mark.parametrize("ratio", ["0", "1.5", "many"])
def test_mask_ratios_are_shares(ratio: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "edit", "--mask-ratio", ratio])
    assert f"'{ratio}' is not a number above 0 and up to 1" in capsys.readouterr().err


def test_bench_edit_needs_a_folder_for_its_file(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "edit", "--json", "missing/bench.json"]) == 2
    assert "no folder missing" in capsys.readouterr().err
