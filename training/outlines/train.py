"""Trains the network of outlines, in a few minutes on a GPU or half an hour on CPU cores:

python -m training.outlines.train PHOTOS OUT.safetensors --minutes 4 --device cuda --batch 64
python -m training.outlines.train PHOTOS OUT.safetensors --minutes 30 --threads 8 --workers 7
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor
from torch.utils.data import DataLoader, IterableDataset

from instgenie.bench.photos import load_photos
from training.cutouts import Cutouts
from training.outlines.clicks import first_clicks, next_clicks
from training.outlines.examples import Sources, batch_of
from training.outlines.network import OutlineNetwork, inputs_of
from training.scenes import load_scenes
from training.views import Draw

ROUNDS = 4  # clicks per batch
RATE = 3e-3
AVERAGE = 0.005  # share of the newest weights in the average that is kept
NUM_CALIBRATION = 8  # batches
FIXED = 0.25  # share of the time at the end in which the statistics of the normalisations are fixed, as on the page
LOG_EVERY = 50  # batches
NUM_GARMENTS = 1200  # photographs of garments that are shown as they are: their outlines are found by colour, so rough
Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # pictures, targets, first clicks, hints


def load_sources(folder: Path, device: str = "cpu", limit: int | None = None) -> Sources:
    """Read the photographs of the training split; what is cut out or put behind is read at half its size."""
    photos = load_photos(folder, "train", limit).to(device)
    is_pet = photos.outlines.flatten(1).any(1)
    cutouts = Cutouts(photos, Draw(Generator(device).manual_seed(0)))
    shown = torch.cat([is_pet.nonzero()[:, 0], cutouts.garments[:NUM_GARMENTS]])
    cut = torch.cat([cutouts.pets, cutouts.garments, cutouts.flowers])
    scenes = load_scenes(folder / "scenes", "train", limit).to(device)
    return Sources(
        pictures=photos.pictures[shown],
        outlines=cutouts.outlines[shown],
        objects=halved(photos.pictures[cut]),
        shapes=halved(cutouts.outlines[cut, None])[:, 0] >= 1,
        others=torch.cat([halved(photos.pictures[~is_pet][::3]), halved(scenes)]),
    )


def halved(images: Tensor) -> Tensor:
    return torch.cat([F.avg_pool2d(some.float(), 2).round().to(torch.uint8) for some in images.split(256)])


class Batches(IterableDataset[Batch]):
    """Endless batches."""

    def __init__(self, sources: Sources, size: int) -> None:
        self.sources, self.size = sources, size

    def __iter__(self) -> Iterator[Batch]:
        while True:  # the loader gives each process its own seed
            pictures, targets = batch_of(self.sources, self.size)
            yield pictures, targets, *first_clicks(targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    share = torch.sigmoid(logits)
    both = (share * targets).sum((1, 2, 3))
    overlap = both / (share.sum((1, 2, 3)) + targets.sum((1, 2, 3)) - both)
    return F.binary_cross_entropy_with_logits(logits, targets) + (1 - overlap).mean()


def overlap_of(logits: Tensor, targets: Tensor) -> Tensor:
    found, wanted = logits > 0, targets > 0.5
    return ((found & wanted).sum((1, 2, 3)) / (found | wanted).sum((1, 2, 3)).clamp(min=1)).mean()


def train(network: OutlineNetwork, batches: Iterator[Batch], seconds: float, out: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(network, avg_fn=lambda old, new, _: old + AVERAGE * (new - old))
    learn(network.train(), batches, seconds * (1 - FIXED), RATE, lambda: average.update_parameters(network))
    network.load_state_dict(average.module.state_dict())
    calibrate(network, batches)
    save(network, out)  # a run that is stopped from here on leaves good weights
    learn(network.eval(), batches, seconds * FIXED, RATE * 0.3, lambda: None)
    save(network, out)


def save(network: OutlineNetwork, out: Path) -> None:
    save_file({name: value.cpu().contiguous() for name, value in network.state_dict().items()}, out)


def learn(
    network: OutlineNetwork, batches: Iterator[Batch], seconds: float, highest: float, after: Callable[[], None]
) -> None:
    """Train for so long, with a rate that falls to 0; `after` is called after each batch."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=highest, weight_decay=1e-4)
    start, step, seen = time.monotonic(), 0, []
    while (spent := (time.monotonic() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = highest * min(1, (step + 1) / 100) * min(1, (1 - spent) / 0.7)
        overlaps = []
        for logits, targets in clicked(network, next(batches)):
            optimizer.zero_grad()
            loss_of(logits, targets).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 3.0)
            optimizer.step()
            overlaps.append(overlap_of(logits.detach(), targets))
        seen.append(torch.stack(overlaps))
        after()
        step += 1
        if step % LOG_EVERY == 0:
            latest = " ".join(f"{value:.3f}" for value in torch.stack(seen).mean(0).tolist())
            print(f"{step} batches, {time.monotonic() - start:.0f} s, IoU by click {latest}", flush=True)
            seen = []


def clicked(network: OutlineNetwork, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and targets after the first click, and after each further one in the middle of what is wrong. A
    further click sees the outline before it."""
    device = next(network.parameters()).device
    pictures, targets, clicks, hint = (part.to(device, non_blocking=True) for part in batch)
    previous = torch.zeros_like(targets)
    for _ in range(ROUNDS):
        inputs = inputs_of(pictures, clicks, hint, previous)
        logits = network(inputs.contiguous(memory_format=torch.channels_last))
        yield logits, targets
        previous = (logits.detach() > 0).float()
        clicks = torch.cat([clicks, next_clicks(logits.detach(), targets)], 1)


@torch.no_grad()
def calibrate(network: OutlineNetwork, batches: Iterator[Batch]) -> None:
    """Measure the statistics of the normalisations again: those of averaged weights are not the average of theirs, and
    one click and four have to share them."""
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
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--batch", type=int, default=48, help="examples per batch")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the network")
    parser.add_argument("--workers", type=int, default=1, help="processes that make batches, one thread each")
    parser.add_argument("--device", default="cpu", help="another device than the CPU also makes the batches")
    parser.add_argument("--limit", type=int, help="photographs to read at most, for a trial")
    parser.add_argument("--init", type=Path, help="trained weights to continue from")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # its backward pass of small convolutions is several times slower there
    network = OutlineNetwork()
    if given.init:
        network.load_state_dict(load_file(given.init))
    sources = load_sources(given.photos, given.device, given.limit)
    dataset = Batches(sources, given.batch)
    if given.device == "cpu":
        batches = iter(DataLoader(dataset, batch_size=None, num_workers=given.workers, prefetch_factor=4))
    else:
        torch.set_default_device(given.device)
        batches = iter(dataset)
    network.to(given.device).to(memory_format=torch.channels_last)
    train(network, batches, given.minutes * 60, given.out)


if __name__ == "__main__":
    main()
