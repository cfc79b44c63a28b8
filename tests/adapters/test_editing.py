"""LoRAs through the editor: names, paths, text encoders, several in one batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.edits import apart, make_edit, run
from helpers.loras import merged, save_lora
from safetensors.torch import load_file, save_file

from instgenie.adapters.keys import NETWORK
from instgenie.cli.arguments import lora
from instgenie.editor import Editor, make_store
from instgenie.engine.lora_shelf import LoraShelf, read_uses
from instgenie.engine.prepare import prepare
from instgenie.errors import EditError, LoraError
from instgenie.jobs.activations import parse_key
from instgenie.models.model import Model
from instgenie.types import LoraUse


def editor_of(model: Model, **loras: str) -> Editor:
    editor = Editor.__new__(Editor)  # with a model that is loaded already
    editor.model, editor.store = model, make_store(model.device)
    editor._loras = LoraShelf(model, loras)
    return editor


def save_whole(path: Path, model: Model) -> Path:
    """A LoRA for the network and for every text encoder, and for layers that embed prompts."""
    tensors = {}
    for part in model.patchable:
        names = [name for name in model.layer_table.shapes[part] if part == NETWORK or "shared" not in name]
        tensors |= load_file(save_lora(path, model, names, part=part, alpha=1.0))
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("family", ["blend", "sd", "sdxl"])
def test_prompts_are_encoded_with_the_lora(models: dict[str, Model], tmp_path: Path, family: str) -> None:
    """As diffusers does: the text encoders of the merged model give the same prompts, and the whole edit is its."""
    model, path = models[family], tmp_path / "whole.safetensors"
    save_whole(path, model)
    edit = make_edit(steps=2, true_guidance=2.0, negative_prompt="sky")
    shelf = LoraShelf(model, {"whole": str(path)})
    named = shelf.resolve(replace(edit, loras=(LoraUse("whole", 0.6),)))
    job = prepare(named, model, prompt_loras=shelf.prompts)
    shelf.give(job, shelf.fetch(named))
    twin = merged(model, (path, 0.6))
    expected = prepare(edit, twin)
    for own, other, plain in zip(job.branches, expected.branches, prepare(edit, model).branches, strict=True):
        assert apart(own.text, other.text) < 1e-4
        assert apart(own.text, plain.text) > 1e-2
        if own.pooled.numel():
            assert apart(own.pooled, other.pooled) < 1e-4
    assert apart(run(model, [job])[0], run(twin, [expected])[0]) < 1e-3
    after = prepare(edit, model).branches[0].text  # the text encoders are as they were
    assert torch.equal(after, prepare(edit, model).branches[0].text)
    assert apart(after, expected.branches[0].text) > 1e-2


def test_an_edit_names_its_loras(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["sd"]
    names = list(model.layer_table.shapes[NETWORK])
    one, two = (save_lora(tmp_path / f"{seed}.safetensors", model, names, seed=seed) for seed in (1, 2))
    editor, edit = editor_of(model, one=str(one)), make_edit(steps=2)

    def paint(**fields: object) -> np.ndarray:
        return editor.edit(edit.picture, edit.mask, edit.prompt, steps=2, size=edit.size, **fields).picture

    plain, styled = paint(), paint(loras=["one"])
    assert not np.array_equal(plain, styled)
    assert np.array_equal(plain[~edit.mask], styled[~edit.mask])
    assert np.array_equal(styled, paint(loras=[str(one)]))  # a path is a name
    assert np.array_equal(styled, paint(loras=[{"name": "one", "scale": 1.0}]))
    assert not np.array_equal(styled, paint(loras=[("one", 0.3)]))
    assert not np.array_equal(styled, paint(loras=["one", (str(two), 0.5)]))
    assert np.array_equal(plain, paint())
    with pytest.raises(LoraError, match="'three' does not exist"):
        paint(loras=["three"])
    with pytest.raises(EditError, match="scale of the LoRA 'one' is 1000"):
        paint(loras=[("one", 1000.0)])
    result = editor.edit_many([replace(edit, loras=(LoraUse("one"),)), edit])
    assert [one.lora_step for one in result] == [0, None]


def test_ways_to_name_a_lora() -> None:
    assert read_uses(["a", ("b", 0.5), {"name": "c"}, LoraUse("d", 2.0)]) == (
        LoraUse("a"),
        LoraUse("b", 0.5),
        LoraUse("c"),
        LoraUse("d", 2.0),
    )
    for wrong in (3, {"scale": 1}, {"name": "a", "weight": 1}, []):
        with pytest.raises(EditError, match="a LoRA is"):
            read_uses([wrong])


def test_a_template_of_its_own_goes_before_that_of_the_base_model(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["sd"]
    path = save_lora(tmp_path / "x.safetensors", model, list(model.layer_table.shapes[NETWORK]), seed=1)
    editor, edit = editor_of(model, x=str(path)), make_edit(steps=3, guidance=2.0)
    styled = replace(edit, loras=(LoraUse("x", 0.5),))
    other = replace(edit, loras=(LoraUse("x", 0.6),))

    def hits() -> list[bool]:
        return [result.cache_hit for result in editor.edit_many([edit, styled, other])]

    editor.register(edit.picture, edit.size, 3, 2.0, loras=[("x", 0.5)])
    assert hits() == [False, True, False]  # another scale is another template
    [own] = editor.edit_many([styled])
    editor.register(edit.picture, edit.size, 3, 2.0)
    assert hits() == [True, True, True]
    assert np.array_equal(editor.edit_many([styled])[0].picture, own.picture)
    resolved = editor.loras.resolve(styled)
    key = editor._find(resolved, model)
    assert key is not None
    assert key.loras == (f"{resolved.loras[0].version} 0.5",)
    assert parse_key(key.text) == key
    base = replace(key, loras=())
    assert "loras" not in base.text
    assert parse_key(base.text) == base
    editor.store = make_store(model.device)
    editor.register(edit.picture, edit.size, 3, 2.0)
    [over_base] = editor.edit_many([styled])
    assert over_base.cache_hit
    assert not np.array_equal(over_base.picture, own.picture)


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("pencil", LoraUse("pencil")),
        ("pencil:0.5", LoraUse("pencil", 0.5)),
        ("a/b.safetensors:-1", LoraUse("a/b.safetensors", -1.0)),
        ("c:/x.safetensors", LoraUse("c:/x.safetensors")),
    ],
)
def test_a_lora_on_the_command_line(text: str, use: LoraUse) -> None:
    assert lora(text) == use
