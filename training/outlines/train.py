"""Trains the network of outlines. Half an hour on one CPU core is enough:

python -m training.outlines.train PHOTOS OUT.pt [--minutes 25]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from instgenie.bench.photos import load_photos
from training.outlines.examples import Sources, batch_of, first_clicks, next_clicks
from training.outlines.network import OutlineNetwork, inputs_of
from training.scenes import load_scenes

BATCH = 32
ROUNDS = 3  # clicks per batch
RATE = 3e-3
AVERAGE = 0.005  # share of the newest weights in the average that is kept
NUM_CALIBRATION = 8  # batches
FIXED = 0.25  # share of the time at the end in which the statistics of the normalisations are fixed, as on the page
LOG_EVERY = 50  # batches


def load_sources(folder: Path) -> Sources:
    """Read the photographs of the training split at half their size."""
    photos = load_photos(folder, "train")
    is_pet = photos.outlines.flatten(1).any(1)
    others = torch.cat([photos.pictures[~is_pet][::3], load_scenes(folder / "scenes", "train")])
    outlines = halved(photos.outlines[is_pet, None])[:, 0] >= 1
    return Sources(halved(photos.pictures[is_pet]), outlines, halved(others))


def halved(images: Tensor) -> Tensor:
    return torch.cat([F.avg_pool2d(some.float(), 2).round().to(torch.uint8) for some in images.split(256)])


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches, made in a process of their own."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield batch_of(self.sources, BATCH)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    share = torch.sigmoid(logits)
    both = (share * targets).sum((1, 2, 3))
    overlap = both / (share.sum((1, 2, 3)) + targets.sum((1, 2, 3)) - both)
    return F.binary_cross_entropy_with_logits(logits, targets) + (1 - overlap).mean()


def overlap_of(logits: Tensor, targets: Tensor) -> float:
    found, wanted = logits > 0, targets > 0.5
    return float(((found & wanted).sum((1, 2, 3)) / (found | wanted).sum((1, 2, 3)).clamp(min=1)).mean())


def train(network: OutlineNetwork, sources: Sources, seconds: float) -> OutlineNetwork:
    batches = iter(DataLoader(Batches(sources), batch_size=None, num_workers=1, prefetch_factor=4))
    average = torch.optim.swa_utils.AveragedModel(network, avg_fn=lambda old, new, _: old + AVERAGE * (new - old))
    learn(network.train(), batches, seconds * (1 - FIXED), RATE, lambda: average.update_parameters(network))
    network.load_state_dict(average.module.state_dict())
    calibrate(network, batches)
    learn(network.eval(), batches, seconds * FIXED, RATE * 0.4, lambda: None)
    return network


def learn(
    network: OutlineNetwork,
    batches: Iterator[tuple[Tensor, Tensor]],
    seconds: float,
    highest: float,
    after: Callable[[], None],
) -> None:
    """Train for so long, with a rate that falls to 0; `after` is called after each batch."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=highest, weight_decay=1e-4)
    start, step, seen = time.monotonic(), 0, [[0.5] for _ in range(ROUNDS)]
    while (spent := (time.monotonic() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = highest * min(1, (step + 1) / 30) * min(1, (1 - spent) / 0.7)
        for turn, (logits, targets) in enumerate(clicked(network, next(batches))):
            optimizer.zero_grad()
            loss_of(logits, targets).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 3.0)
            optimizer.step()
            seen[turn].append(overlap_of(logits, targets))
        after()
        step += 1
        if step % LOG_EVERY == 0:
            latest = " ".join(f"{sum(some[-LOG_EVERY:]) / LOG_EVERY:.3f}" for some in seen)
            print(f"{step} batches, {time.monotonic() - start:.0f} s, IoU by click {latest}", flush=True)


def clicked(network: OutlineNetwork, batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and targets after the first click, and after each further one in the middle of what is wrong."""
    pictures, targets = batch
    clicks, hint = first_clicks(targets)
    for _ in range(ROUNDS):
        logits = network(inputs_of(pictures, clicks, hint))
        yield logits, targets
        clicks = torch.cat([clicks, next_clicks(logits.detach(), targets)], 1)


@torch.no_grad()
def calibrate(network: OutlineNetwork, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Measure the statistics of the normalisations again: those of averaged weights are not the average of theirs, and
    one click and three have to share them."""
    network.train()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    for _ in range(NUM_CALIBRATION):
        for _ in clicked(network, next(batches)):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the network that turns clicks into an outline.")
    parser.add_argument("photos", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--init", type=Path, help="trained weights to continue from")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # its backward pass of small convolutions is several times slower on ARM
    network = OutlineNetwork()
    if given.init:
        network.load_state_dict(load_file(given.init))
    network = train(network, load_sources(given.photos), given.minutes * 60)
    save_file(network.state_dict(), given.out)


if __name__ == "__main__":
    main()
