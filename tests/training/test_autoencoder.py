"""Parts of the autoencoder's training: scenes and their split, the discriminator's share of the gradient."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.photos import add_file, encode

from instgenie.bench.photos import is_validation
from training.discriminator import Discriminator, balance, discriminator_loss
from training.scenes import load_scenes


def test_all_crops_of_a_photograph_are_on_one_side(tmp_path: Path) -> None:
    names = [f"photo {number}" for number in range(400)]
    held_out = next(name for name in names if is_validation(name))
    kept = next(name for name in names if not is_validation(name))
    crops = {f"{photo} {crop}": photo for photo in (held_out, kept) for crop in range(3)}
    (tmp_path / "scenes.csv").write_text("id,photo\n" + "".join(f"{id},{photo}\n" for id, photo in crops.items()))
    with tarfile.open(tmp_path / "scenes-00.tar", "w") as tar:
        for id, photo in crops.items():
            value = 200 if photo == held_out else 40
            add_file(tar, f"{id}.webp", encode(np.full((256, 256, 3), value, np.uint8), "WEBP"))
    validation, training = load_scenes(tmp_path, "val"), load_scenes(tmp_path, "train")
    assert validation.shape == training.shape == (3, 3, 256, 256)
    assert validation.min() > 190
    assert training.max() < 50
    assert len(load_scenes(tmp_path, "train", limit=2)) == 2


def test_the_discriminator_learns_to_tell_pictures_apart() -> None:
    torch.manual_seed(0)
    discriminator = Discriminator()
    optimiser = torch.optim.AdamW(discriminator.parameters(), lr=1e-3)
    real, decoded = torch.randn(4, 3, 32, 32), torch.zeros(4, 3, 32, 32)
    assert discriminator(real).shape == (4, 1, 4, 4)
    before = discriminator_loss(discriminator, real, decoded).item()
    for _ in range(20):
        optimiser.zero_grad()
        discriminator_loss(discriminator, real, decoded).backward()
        optimiser.step()
    assert discriminator_loss(discriminator, real, decoded).item() < before / 2


def test_the_weight_makes_gradients_equal_and_never_exceeds_one() -> None:
    last = torch.tensor([3.0, 4.0], requires_grad=True)
    weak, strong = last.square().sum() / 10, last.square().sum()
    assert balance(weak, strong, last).item() == pytest.approx(0.1, rel=1e-3)
    assert balance(strong, weak, last).item() == 1.0
