"""ControlNets in Python: names and folders, images, crops, and what is refused."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.controlnets import control_image, controlled, save_controlnet
from helpers.edits import make_edit, run
from helpers.waits import Waits

from instgenie.adapters.controlnets import ControlNetRegistry, open_controlnet
from instgenie.cli.arguments import control
from instgenie.cli.edit import open_controls
from instgenie.editor import Editor, make_store
from instgenie.engine.control_graphs import ControlGraphs
from instgenie.engine.controls import LocalControls, control_shape
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.errors import ControlError, ControlNotFoundError, EditError
from instgenie.models.model import Model
from instgenie.pictures.cropping import crop_edit
from instgenie.pictures.picture import check_edit, save_picture
from instgenie.types import Box, ControlUse


@pytest.fixture
def model(models: dict[str, Model]) -> Model:
    return models["sd"]


@pytest.fixture
def editor(model: Model, tmp_path: Path) -> Editor:
    editor = Editor.__new__(Editor)  # with a model that is loaded already
    editor.model, editor.store = model, make_store(model.device)
    editor._controlnets = ControlNetRegistry({"edges": str(save_controlnet(tmp_path / "edges", model))})
    return editor


def test_the_editor_takes_names_paths_and_images(editor: Editor, tmp_path: Path) -> None:
    edit = make_edit(reuse="off")
    options: dict[str, Any] = {"size": edit.size, "steps": 3, "reuse": "off"}
    image = control_image(edit)

    def picture(**control: Any) -> Any:
        return editor.edit(edit.picture, edit.mask, "a cat", controls=[control], **options).picture

    named, by_path = picture(name="edges", image=image), picture(name=str(tmp_path / "edges"), image=image)
    assert np.array_equal(named, by_path)
    assert not np.array_equal(named, picture(name="edges", image="canny"))
    assert not np.array_equal(named, picture(name="edges", image=image, scale=0.3))
    asked = replace(edit, prompt="a cat", steps=3, guidance=editor.model.guidance)
    job = prepare(controlled(asked, (tmp_path / "edges", {})), editor.model)
    [latents] = run(editor.model, [job])
    assert np.array_equal(named, finish(replace(job, latents=latents), editor.model))
    with pytest.raises(ControlNotFoundError, match=r"'nobody' does not exist: .*'edges' are known"):
        picture(name="nobody", image=image)


def test_a_crop_has_the_same_crop_of_the_control_image(tmp_path: Path, model: Model) -> None:
    edit = controlled(make_edit(), (save_controlnet(tmp_path / "net", model), {}))
    box = Box(range(8, 24), range(16, 40))
    cropped = crop_edit(edit, box)
    assert np.array_equal(cropped.control_images[0], edit.control_images[0][8:24, 16:40])
    assert np.array_equal(cropped.picture, edit.picture[8:24, 16:40])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": 11.0}, "scale of the ControlNet 'a' is 11.0: a number from -10 to 10"),
        ({"scale": float("nan")}, "scale of the ControlNet 'a' is nan"),
        ({"start": 0.7, "end": 0.2}, "start of the ControlNet 'a' is 0.7 and its end 0.2"),
        ({"end": 1.5}, "end of the ControlNet 'a' is 1.5: a number from 0 to 1"),
    ],
)
def test_numbers_out_of_range(fields: dict[str, float], message: str) -> None:
    edit = make_edit()
    with pytest.raises(EditError, match=message):
        check_edit(replace(edit, controls=(ControlUse("a", **fields),), control_images=(edit.picture,)))


def test_images_must_be_as_many_and_as_large() -> None:
    edit = make_edit()
    with pytest.raises(EditError, match="1 ControlNets and 0 control images"):
        check_edit(replace(edit, controls=(ControlUse("a"),)))
    with pytest.raises(EditError, match="5 ControlNets: at most 4"):
        check_edit(replace(edit, controls=(ControlUse("a"),) * 5, control_images=(edit.picture,) * 5))
    with pytest.raises(EditError, match=r"is \[31, 48, 3\]: \[32, 48, 3\]"):
        check_edit(replace(edit, controls=(ControlUse("a"),), control_images=(edit.picture[1:],)))


def test_folders_are_checked_by_their_config(models: dict[str, Model], tmp_path: Path) -> None:
    sd, flux = save_controlnet(tmp_path / "sd", models["sd"]), save_controlnet(tmp_path / "flux", models["blend"])
    found = open_controlnet("edges", sd)
    found.check(control_shape(models["sd"]))
    assert found.places == (6, 1)
    with pytest.raises(ControlError, match=r"block_out_channels is \[16, 32, 32\], the model's is \[16, 32\]"):
        found.check(control_shape(models["sdxl"]))
    with pytest.raises(ControlError, match="is a FluxControlNetModel: this model needs a ControlNetModel or a C"):
        open_controlnet("edges", flux).check(control_shape(models["sd"]))
    deep = save_controlnet(tmp_path / "deep", models["blend"], num_layers=2)
    registry = ControlNetRegistry({"flux": str(flux), "deep": str(deep)})
    with pytest.raises(ControlError, match=r"cannot guide one edit: they have \(1, 1\) and \(2, 1\) residuals"):
        registry.resolve([ControlUse("flux"), ControlUse("deep")])


def test_folders_that_hold_no_controlnet(models: dict[str, Model], tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="does not exist"):
        open_controlnet("a", tmp_path / "nowhere")
    with pytest.raises(ControlError, match=r"holds no config.json"):
        open_controlnet("a", tmp_path)
    net = save_controlnet(tmp_path / "net", models["sd"])
    config = json.loads((net / "config.json").read_text())
    for change, message in [
        ({"_class_name": "SD3ControlNetModel"}, "is a SD3ControlNetModel"),
        ({"global_pool_conditions": True}, "global_pool_conditions=True"),
    ]:
        (net / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ControlError, match=message):
            open_controlnet("a", net)
    (net / "config.json").write_text(json.dumps(config))
    [weights] = net.glob("*.safetensors")
    weights.rename(net / "weights.bin")
    with pytest.raises(ControlError, match=r"no weights in safetensors: .* holds weights.bin"):
        open_controlnet("a", net)
    with pytest.raises(ControlError, match="not one for a ControlNet"):
        ControlNetRegistry({"../a": str(net)})


def test_the_command_line_opens_images(tmp_path: Path) -> None:
    picture = make_edit().picture
    save_picture(picture[:, ::-1], tmp_path / "pose.png")
    given = [control("edges=canny"), control(f"pose:0.5={tmp_path / 'pose.png'}")]
    found = open_controls(Namespace(given_controls=given), picture)
    assert [(use.name, use.scale) for use in found["controls"]] == [("edges", 1.0), ("pose", 0.5)]
    assert np.array_equal(found["control_images"][1], picture[:, ::-1])
    with pytest.raises(ControlError, match="would need a depth estimator"):
        open_controls(Namespace(given_controls=[control("a=depth")]), picture)


def test_arguments_of_the_command_line() -> None:
    assert control("edges=canny") == {"name": "edges", "image": "canny", "scale": 1.0, "start": 0.0, "end": 1.0}
    assert control("edges:0.8:0.1-0.5=a=b.png") == {
        "name": "edges", "image": "a=b.png", "scale": 0.8, "start": 0.1, "end": 0.5,
    }  # fmt: skip
    for wrong in ("edges", "=a.png", "edges:x=a.png", "edges:1:2=a.png"):
        with pytest.raises(Exception, match="is not NAME"):
            control(wrong)


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("family", ["sd", "sdxl", "blend_guided"])
def test_no_step_with_controlnets_waits(models: dict[str, Model], family: str, captures: bool, tmp_path: Path) -> None:
    """On a GPU neither the host nor, before residuals are needed, the network waits for a ControlNet, whether its pass
    runs as it is, is captured or repeated."""
    model = models[family]
    edit = controlled(make_edit(steps=4, true_guidance=2.0), (save_controlnet(tmp_path / "net", model), {"end": 0.8}))
    controls = LocalControls(model, graphs=ControlGraphs(model.device) if captures else None)
    job, engine, waits = prepare(edit, model), Engine(model, controls=controls), Waits()
    engine.join(job)
    engine.step()  # opens the job, and leaves what the model keeps for all jobs
    while engine.jobs:
        with waits:
            engine.step()
    assert waits.found == []
