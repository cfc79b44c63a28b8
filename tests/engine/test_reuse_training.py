"""The predictor of reuse learns from dense pictures when guesses are good."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from instgenie.cli import main
from instgenie.engine.reuse_predictor import DEFAULT_FILE, FEATURES, read_predictor
from instgenie.engine.reuse_training import Recording, ReuseSetting, fit, picture_from, record, replay, sample_blocks
from instgenie.errors import ConfigError, ModelError
from instgenie.jobs.blocks import BLOCK_FEATURES
from instgenie.jobs.history import TokenHistory
from instgenie.models.joint.reused import pool_one
from instgenie.models.model import Model


def test_guesses_go_on_as_predictions_moved() -> None:
    start = torch.randn(5, 3)
    history = TokenHistory.start(start, start, 1.0, 0, trust=1.0)
    _, history = history.after(start + 0.5, None, start, 0.5, 1)
    assert torch.allclose(history.guess(0.25), start + 0.75)
    index = torch.tensor([1, 3])
    completed, history = history.after(torch.zeros(2, 3), index, start, 0.0, 2)
    assert torch.equal(completed[index], torch.zeros(2, 3))
    assert torch.allclose(completed[0], start[0] + 1.0)  # guessed: nothing was computed
    assert history.steps.tolist() == [1, 2, 1, 2, 1]
    assert torch.allclose(history.predictions[0], start[0] + 0.5)


def test_tiles_have_their_largest_value() -> None:
    values = torch.arange(15.0)
    assert pool_one(values, (3, 5), 1).tolist() == values.tolist()
    assert pool_one(values, (3, 5), 2).tolist() == [6, 6, 8, 8, 9, 6, 6, 8, 8, 9, 11, 11, 13, 13, 14]
    assert pool_one(values, (3, 5), 0).tolist() == [14.0] * 15


def test_a_predictor_learns_which_tokens_move(models: dict[str, Model]) -> None:
    """Half of the tokens jump about, the others move evenly."""
    model = models["blend"]
    found = record(model, replace(picture_from("a cat", 0, model, (32, 32)), steps=12))
    steady = found.predictions[:1] + torch.arange(12.0)[:, None, None] * 0.01
    jumping = torch.where(torch.arange(steady.shape[1])[None, :, None] % 2 == 0, torch.randn_like(steady), 0)
    generator = torch.Generator().manual_seed(0)

    def sampled(predictions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(replay(Recording(found.latents, predictions, found.schedule), 4, 0.8, generator))

    trained = fit([sampled(steady + jumping) for _ in range(4)], ReuseSetting())
    assert trained.accuracy > 0.9
    with pytest.raises(ModelError, match="choose another"):
        fit([sampled(steady) for _ in range(2)], ReuseSetting(tolerance=0.9))


def test_guesses_of_tiles_of_a_unet_are_sampled(models: dict[str, Model]) -> None:
    model = models["sd"]
    edit = replace(picture_from("a cat", 0, model, (48, 48)), steps=6)
    samples = sample_blocks(model, edit, ReuseSetting(per_block=True, tile=2), 0)
    features, errors = map(torch.cat, zip(*samples, strict=True))
    assert features.shape == (len(errors), len(BLOCK_FEATURES))
    assert features.isfinite().all()
    assert errors.median() > 0


def test_the_command_writes_a_predictor(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "reuse.json"
    given = [
        "train-reuse",
        str(folders["blend"]),
        "--device",
        "cpu",
        "--pictures",
        "4",
        "--steps",
        "6",
        "--size",
        "32x32",
    ]
    assert main([*given, "--out", str(tmp_path / "missing" / "reuse.json")]) == 2
    main([*given, "--tolerance", "0.3", "--blocks", "--tile", "2", "--out", str(path)])
    predictor = read_predictor(path)
    assert (len(predictor.weights), predictor.tile, predictor.per_block) == (len(BLOCK_FEATURES), 2, True)
    main([*given, "--tolerance", "0.5", "--out", str(path)])
    predictor = read_predictor(path)
    assert (len(predictor.weights), predictor.tile, predictor.tolerance) == (len(FEATURES), 0, 0.5)
    path.write_text(path.read_text().replace("age", "rage"))
    with pytest.raises(ConfigError, match="rage"):
        read_predictor(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "x"), ("bias", math.nan), ("weights", [math.inf] * len(FEATURES)), ("max_steps", None),
        ("max_steps", 0), ("tile", -3), ("tile", 2.5), ("trust", 2), ("max_share", 0.5), ("features", [1, 2]),
    ],
)  # fmt: skip
def test_a_malformed_predictor_is_refused(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "reuse.json"
    path.write_text(json.dumps(json.loads(DEFAULT_FILE.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=f"{field}|features 1, 2"):
        read_predictor(path)
