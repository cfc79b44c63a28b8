"""The built-in model: plain diffusers runs it, and its files are small enough to ship."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from PIL import Image, ImageFilter
from safetensors import safe_open

import instgenie
from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.adapters.shipped import shipped_controlnets, shipped_loras
from instgenie.editor import Editor, make_store
from instgenie.engine.lora_shelf import LoraShelf
from instgenie.machine.model_folders import BUILTIN
from instgenie.models.model import Model
from instgenie.pictures.examples import EXAMPLES

MEBIBYTE = 2**20


def test_plain_diffusers_runs_it() -> None:
    pipeline = FluxFillPipeline.from_pretrained(BUILTIN)
    pipeline.set_progress_bar_config(disable=True)
    picture = Image.fromarray(np.full((256, 256, 3), 128, np.uint8))
    whole = Image.new("L", (256, 256), 255)
    cat, rose = (
        np.asarray(
            pipeline(
                prompt=prompt,
                image=picture,
                mask_image=whole,
                height=256,
                width=256,
                num_inference_steps=8,
                guidance_scale=3.5,
                max_sequence_length=pipeline.tokenizer_2.model_max_length,
                generator=torch.Generator().manual_seed(0),
            ).images[0]
        ).astype(float)
        for prompt in ("a photo of a Bombay cat", "a photo of a rose")
    )
    assert cat.shape == (256, 256, 3)
    assert min(cat.std(), rose.std()) > 20  # pictures, not a flat grey
    assert np.abs(cat - rose).mean() > 20  # that depend on the prompt


def test_files_are_small_enough_to_ship() -> None:
    package = Path(instgenie.__file__).parent
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    sizes = {path: path.stat().st_size for path in files}
    assert max(size for path, size in sizes.items() if path.is_relative_to(BUILTIN)) < 16 * MEBIBYTE
    assert sum(sizes.values()) < 112 * MEBIBYTE


def test_weights_are_float16_safetensors() -> None:
    files = sorted(BUILTIN.rglob("*.safetensors"))
    assert len(files) >= 5
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float16}  # noqa: SIM118
    assert not [path for path in BUILTIN.rglob("*") if path.suffix in {".bin", ".pt", ".pth", ".ckpt"}]


@pytest.fixture(scope="module")
def editor(models: dict[str, Model]) -> Editor:
    """An editor with the adapters of the built-in model, and with a model that is loaded already."""
    editor = Editor.__new__(Editor)
    editor.model, editor.store = models["builtin"], make_store(models["builtin"].device)
    editor._loras = LoraShelf(editor.model, shipped_loras("builtin"))
    editor._controlnets = ControlNetRegistry(shipped_controlnets("builtin"))
    return editor


def paint(editor: Editor, **fields: object) -> np.ndarray:
    """The middle of a photograph, painted anew."""
    photo = np.asarray(Image.open(EXAMPLES / "cat.png").convert("RGB").resize((256, 256)))
    mask = np.zeros((256, 256), np.bool_)
    mask[40:216, 40:216] = True
    painted = editor.edit(photo, mask, "a photo of a Siamese cat", seed=3, steps=8, **fields).picture
    assert np.array_equal(painted[~mask], photo[~mask])
    return painted[40:216, 40:216].astype(float)


@pytest.fixture(scope="module")
def plain(editor: Editor) -> np.ndarray:
    """What it paints without adapters."""
    return paint(editor)


def colourfulness(pixels: np.ndarray) -> float:
    return float((pixels.max(2) - pixels.min(2)).mean())


def test_its_loras_have_their_looks(editor: Editor, plain: np.ndarray) -> None:
    pencil, teal = (paint(editor, loras=[name]) for name in ("pencil", "teal"))
    assert colourfulness(pencil) < 0.4 * colourfulness(plain)  # grey
    assert pencil.mean() > plain.mean()  # on paper
    dark = teal.mean(2) < 80
    assert teal[dark][:, 2].mean() > teal[dark][:, 0].mean() + 20  # shadows are teal
    assert plain[plain.mean(2) < 80][:, 2].mean() < plain[plain.mean(2) < 80][:, 0].mean() + 20


def test_its_controlnet_follows_edges(editor: Editor, plain: np.ndarray) -> None:
    """A circle that no photograph has appears where the image of the ControlNet has it."""
    rows, columns = np.mgrid[:256, :256]
    ring = np.abs(np.hypot(rows - 128, columns - 128) - 60) < 1
    image = np.repeat((255 * ring).astype(np.uint8)[..., None], 3, axis=2)
    near = np.asarray(Image.fromarray(ring).convert("L").filter(ImageFilter.MaxFilter(5)))[40:216, 40:216] > 0

    def follows(painted: np.ndarray) -> float:
        """How much stronger edges are along the circle than elsewhere."""
        grey = painted.mean(2)
        change = np.hypot(*np.gradient(grey))
        return float(change[near].mean() / change[~near].mean())

    guided = paint(editor, controls=[{"name": "edges", "image": image}])
    assert follows(guided) > 1.3 * follows(plain)
