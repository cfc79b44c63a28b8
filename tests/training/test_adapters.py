"""Trainings of adapters: edges on the device, looks, and files that the engine and diffusers read as trained."""

import json
import shutil
import threading
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxControlNetModel, FluxFillPipeline, FluxPipeline
from helpers.controlnets import quiet_flux
from helpers.fill_pipelines import save_pipeline
from helpers.loras import load_lora
from helpers.photos import write_photos
from PIL import Image
from torch import Generator

import training.pipeline
from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.bench.photos import load_photos
from instgenie.models.loading.load import load
from instgenie.pictures.canny import canny
from training import train_controlnet, train_lora
from training.edges import canny_batch, edge_images
from training.examples import Captions, ExampleSource
from training.fitting import Course, Ground
from training.model import flow_loss
from training.styles import SOURCES, pencil, teal
from training.train_controlnet import Guided, build_controlnet, save_controlnet


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, num_val=2, num_train=4)
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("pipeline"), 3, 12)


def pictures_of(height: int, width: int) -> np.ndarray:
    generator = np.random.default_rng(3)
    small = generator.integers(0, 256, (4, 12, 12, 3), dtype=np.uint8)
    return np.stack([np.array(Image.fromarray(one).resize((width, height))) for one in small])


@pytest.mark.parametrize("size", [(64, 64), (56, 72)])
def test_edges_of_a_batch_are_those_of_each_picture(size: tuple[int, int]) -> None:
    pictures = pictures_of(*size)
    pictures[3] = np.random.default_rng(0).integers(0, 256, (*size, 3))  # noise: strong edges everywhere
    edges = canny_batch(torch.from_numpy(pictures).permute(0, 3, 1, 2).int())
    for picture, found in zip(pictures, edges, strict=True):
        expected = canny(picture)[..., 0] > 0
        assert expected.any()
        assert np.array_equal(found.numpy(), expected)


def test_edges_of_larger_pictures_have_the_size_of_the_model() -> None:
    pixels = torch.from_numpy(pictures_of(64, 64)).permute(0, 3, 1, 2)
    large = edge_images(pixels / 127.5 - 1, enlarged=2)
    assert large.shape == (4, 3, 64, 64)
    assert large.min() == -1
    assert ((large > -1) & (large < 1)).any()


def test_looks_change_the_masked_part_alone(photos: Path) -> None:
    found = load_photos(photos, "train")
    captions = Captions(found)
    plain = ExampleSource(found, captions, Generator().manual_seed(1)).draw(6, 64, 64)
    for style, look in (("pencil", pencil), ("teal", teal)):
        styled = SOURCES[style](found, captions, Generator().manual_seed(1)).draw(6, 64, 64)
        inside = plain.masks[:, None].expand_as(plain.pictures)
        assert torch.equal(styled.pictures[~inside], plain.pictures[~inside])
        assert torch.equal(styled.pictures[inside], look(plain.pictures.clamp(-1, 1))[inside])
        assert styled.pictures.abs().max() <= 1


def test_a_pencil_draws_edges_on_paper_and_teal_has_two_colours() -> None:
    picture = torch.full((1, 3, 64, 64), 0.6)
    assert pencil(picture).min() > 0.7  # paper
    picture[..., 32:] = -0.6
    drawing = pencil(picture)
    assert drawing[..., 34].max() < drawing[..., 10].min() - 0.5  # a stroke where the picture turns dark
    assert torch.equal(drawing[:, 0], drawing[:, 2])
    dark, light = teal(torch.full((1, 3, 4, 4), -1.0)), teal(torch.ones(1, 3, 4, 4))
    assert dark[0, 2, 0, 0] > dark[0, 0, 0, 0]
    assert light[0, 0, 0, 0] > light[0, 2, 0, 0]


def test_a_course_ends_with_its_steps_or_its_time() -> None:
    course = Course(minutes=60, steps=4)
    course.step = 2
    assert 0.5 <= course.share < 0.51
    course.step = 4
    assert course.done
    assert Course(minutes=1e-9, steps=None).done


def arguments(photos: Path, pipeline: Path, out: Path, *more: str) -> list[str]:
    shared = {"--photos": photos, "--pipeline": pipeline, "--out": out, "--batch": 4, "--device": "cpu"}
    return [*(str(word) for pair in shared.items() for word in pair), *more]


def test_a_trained_lora_is_what_the_engine_and_diffusers_read(photos: Path, pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "loras" / "pencil.safetensors"
    before, after = train_lora.main(
        arguments(photos, pipeline, out, "--style", "pencil", "--rank", "4", "--steps", "6", "--minutes", "30")
    )
    assert after < before
    lora = load_lora(out, load(str(pipeline)))  # fitted to the model: an unknown key would be refused
    assert len(lora.layers) == 12 + 5  # of a double and a single block
    state, _ = FluxPipeline.lora_state_dict(str(out.parent), weight_name=out.name, return_alphas=True)
    for (_, name), low in lora.layers.items():
        up, down = (state[f"transformer.{name}.{matrix}.weight"].float() for matrix in ("lora_B", "lora_A"))
        assert low.delta.abs().max() > 0
        assert torch.allclose(low.delta.view_as(up @ down), up @ down, atol=1e-6)


def ground(photos: Path, pipeline: Path) -> Ground:
    return Ground(Namespace(
        photos=photos, pipeline=pipeline, scenes=None, limit=None, batch=4, device="cpu", seed=0, minutes=30, steps=1,
        wait=False,
    ))  # fmt: skip


def test_a_new_controlnet_changes_nothing_and_gets_no_residuals_outside(photos: Path, pipeline: Path) -> None:
    found = ground(photos, pipeline)
    net = build_controlnet(found.model.transformer)
    guided, inputs = Guided(found.model, net, found.vae), found.judged[0]
    assert torch.equal(guided.loss(inputs), flow_loss(found.model, inputs))
    torch.nn.init.normal_(net.controlnet_blocks[0].weight)
    residuals = guided.residuals(inputs)
    touched = residuals.abs().sum(-1) > 0
    expected = torch.zeros_like(touched)
    expected[:, : inputs.num_tokens] = True
    expected[:2] &= inputs.masked[:2]
    assert torch.equal(touched, expected)
    assert not torch.equal(guided.loss(inputs), flow_loss(found.model, inputs))


def test_a_trained_controlnet_fits_the_model(photos: Path, pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "controlnets" / "edges"
    before, after = train_controlnet.main(
        arguments(photos, pipeline, out, "--steps", "4", "--minutes", "30", "--batch", "2")
    )
    assert after < before
    model, registry = load(str(pipeline)), ControlNetRegistry({"edges": str(out)})
    registry.shape = model.guided.shape(model.network.config, model.latent_channels)
    assert registry.find("edges").places == (1, 0)
    assert "_name_or_path" not in json.loads((out / "config.json").read_text())
    with quiet_flux():
        net = FluxControlNetModel.from_pretrained(out)
    assert net.controlnet_blocks[0].weight.abs().max() > 0
    save_controlnet(tmp_path / "again", net)
    assert (tmp_path / "again" / "config.json").read_text() == (out / "config.json").read_text()


def test_a_training_waits_for_its_model(photos: Path, pipeline: Path, tmp_path: Path) -> None:
    later, out = tmp_path / "pipeline", tmp_path / "pencil.safetensors"
    shutil.copytree(pipeline, partial := tmp_path / "pipeline.partial")
    saving = threading.Timer(1.0, partial.rename, [later])
    saving.start()
    train_lora.main(arguments(photos, later, out, "--style", "pencil", "--steps", "1", "--minutes", "30", "--wait"))
    saving.join()
    assert out.is_file()


def test_a_pipeline_appears_at_once_and_nothing_of_another_stays(pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    (folder / "loras").mkdir(parents=True)
    pipe = FluxFillPipeline.from_pretrained(pipeline)
    encoders, tokenizers = (pipe.text_encoder, pipe.text_encoder_2), (pipe.tokenizer, pipe.tokenizer_2)
    training.pipeline.save_pipeline(folder, pipe.vae, pipe.transformer, encoders, tokenizers)
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]
    assert not (folder / "loras").exists()
    training.pipeline.wait_for(folder)
    assert FluxFillPipeline.from_pretrained(folder).scheduler.config.shift == training.pipeline.SHIFT
