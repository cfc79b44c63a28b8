"""The network of outlines: its examples, its clicks, and that the page runs the same network (under Node)."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.outlines.clicks import first_clicks, next_clicks
from training.outlines.examples import Sources, batch_of
from training.outlines.network import SIDE, OutlineNetwork, inputs_of
from training.outlines.shapes import thin
from training.outlines.train import ROUNDS, clicked
from training.outlines.weights import packed

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
GRID = (60, 80)  # (height, width)


def ask(folder: Path, act: str, **given: Any) -> Any:
    (folder / "request.json").write_text(json.dumps({"act": act, **given}))
    command = ["node", str(Path(__file__).parent / "outlines.mjs"), str(folder / "request.json")]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def network() -> OutlineNetwork:
    """A network whose normalisations do something."""
    torch.manual_seed(0)
    made = OutlineNetwork().eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return made


@needs_node
@torch.no_grad()
def test_the_page_runs_the_same_network_on_the_same_inputs(tmp_path: Path) -> None:
    height, width = 96, SIDE
    torch.manual_seed(2)
    picture = torch.randint(256, (3, height, width))
    before = torch.zeros(height, width)
    before[20:60, 30:70] = 1
    clicks = [(40.0, 50.0, 1), (90.0, 20.0, -1), (15.0, 70.0, 1)]
    hint = torch.zeros(height, width)
    hint[10:80, 20:90] = 1
    made = network()
    inputs = inputs_of(picture[None].float() / 255, torch.tensor(clicks)[None], hint[None, None], before[None, None])
    found = ask(
        tmp_path,
        "logits",
        weights=list(packed(made)),
        picture=torch.cat([picture, torch.full_like(picture[:1], 255)]).permute(1, 2, 0).flatten().tolist(),
        width=width,
        height=height,
        clicks=[{"x": x + 0.5, "y": y + 0.5, "inside": sign > 0} for x, y, sign in clicks],
        hint=[[20, 10], [90, 10], [90, 80], [20, 80]],
        before=before.int().flatten().tolist(),
    )
    wanted = made(inputs).flatten()
    assert (torch.tensor(found) - wanted).abs().max() < 0.03 * wanted.abs().max()  # weights have eight bits
    without = made(inputs * torch.tensor([1.0] * 10 + [0.0])[None, :, None, None]).flatten()
    assert (without - wanted).abs().max() > 0.1 * wanted.abs().max()  # the outline before counts


def refine(folder: Path, shares: Tensor, before: Tensor, x: int, y: int, *, inside: bool) -> Tensor:
    height, width = GRID
    click = {"cell": y * width + x, "inside": inside}
    sent = {"shares": shares.flatten().tolist(), "before": before.int().flatten().tolist()}
    made = ask(folder, "refined", **sent, width=width, height=height, click=click)
    return torch.tensor(made).view(GRID).bool()


def selection() -> Tensor:
    before = torch.zeros(GRID).bool()
    before[20:40, 20:40] = True
    return before


@needs_node
def test_a_click_beside_the_outline_grows_it_modestly_whatever_the_network_says(tmp_path: Path) -> None:
    before = selection()
    made = refine(tmp_path, torch.ones(GRID), before, 42, 30, inside=True)
    assert made[30, 42]
    assert (made & before).sum() == before.sum()  # nothing is taken away
    assert before.sum() < made.sum() < 2 * before.sum()
    far = refine(tmp_path, torch.ones(GRID), before, 75, 30, inside=True)
    assert made.sum() < far.sum() < 0.5 * far.numel()


@needs_node
def test_a_click_adds_the_region_that_it_lies_in_and_no_other(tmp_path: Path) -> None:
    before = selection()
    shares = before.float()
    shares[24:36, 40:50] = 0.9  # beside the outline, with the click
    shares[50:58, 60:78] = 0.9  # elsewhere
    made = refine(tmp_path, shares, before, 45, 30, inside=True)
    wanted = before.clone()
    wanted[24:36, 40:50] = True
    assert torch.equal(made, wanted)


@needs_node
def test_a_region_that_is_too_large_is_cut_where_the_network_is_less_sure(tmp_path: Path) -> None:
    before = selection()
    shares = torch.full(GRID, 0.6)
    shares[24:36, 40:50] = 0.9
    made = refine(tmp_path, shares, before, 45, 30, inside=True)
    assert (made & ~before).nonzero().amin(0).tolist() == [24, 40]
    assert (made & ~before).nonzero().amax(0).tolist() == [35, 49]


@needs_node
def test_a_click_outside_takes_away_the_region_that_it_lies_in(tmp_path: Path) -> None:
    before = selection()
    shares = before.float()
    shares[20:40, 33:40] = 0.2
    shares[20:23, 20:23] = 0.2  # not connected with the click
    made = refine(tmp_path, shares, before, 36, 30, inside=False)
    wanted = before.clone()
    wanted[:, 33:] = False
    assert torch.equal(made, wanted)


def sources() -> Sources:
    torch.manual_seed(0)
    outlines = torch.zeros(4, 256, 256, dtype=torch.bool)
    outlines[:, 80:180, 60:200] = True
    return Sources(
        pictures=torch.randint(256, (4, 3, 256, 256), dtype=torch.uint8),
        outlines=outlines,
        objects=torch.randint(256, (4, 3, 128, 128), dtype=torch.uint8),
        shapes=outlines[:, ::2, ::2],
        others=torch.randint(256, (4, 3, 128, 128), dtype=torch.uint8),
    )


def test_examples_are_pictures_with_one_target_that_is_clicked_inside() -> None:
    pictures, targets = batch_of(sources(), 12)
    assert pictures.shape[1:] == (3, SIDE, SIDE)
    assert targets.shape[1:] == (1, SIDE, SIDE)
    assert len(pictures) == len(targets) >= 6
    assert 0 <= pictures.min() < pictures.max() <= 1
    clicks, hints = first_clicks(targets)
    assert hints.shape == targets.shape
    for (x, y, _), target in zip(clicks[:, 0].long().tolist(), targets[:, 0], strict=True):
        assert target[y, x] == 1


def test_thin_things_are_thin() -> None:
    torch.manual_seed(0)
    shapes = (thin(40) > 0.5).float()
    seen = shapes[shapes.sum((1, 2, 3)) > 30]
    left = -nn.functional.max_pool2d(-seen, 19, 1, 9)  # what is wider than 19 pixels
    assert (left.sum((1, 2, 3)) < 0.1 * seen.sum((1, 2, 3))).float().mean() > 0.8


def test_a_further_click_lies_in_what_is_wrong() -> None:
    targets = torch.zeros(2, 1, SIDE, SIDE)
    targets[:, :, 30:90, 30:90] = 1
    logits = torch.where(targets > 0, 4.0, -4.0)
    logits[0, :, 30:60, 30:90] = -4.0  # missed
    logits[1, :, 95:125, 20:110] = 4.0  # taken
    torch.manual_seed(1)
    signs = set()
    for _ in range(8):
        (x0, y0, one), (x1, y1, other) = next_clicks(logits, targets)[:, 0].tolist()
        assert targets[0, 0, int(y0), int(x0)] > logits[0, 0, int(y0), int(x0)]
        assert targets[1, 0, int(y1), int(x1)] < logits[1, 0, int(y1), int(x1)]
        signs.add((one, other))
    assert (1, -1) in signs
    assert {one for one, _ in signs} <= {0, 1}


def test_each_click_sees_the_outline_before_it() -> None:
    seen: list[Tensor] = []

    class Watched(OutlineNetwork):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs[:, -1:])
            return super().forward(inputs)

    targets = torch.zeros(2, 1, SIDE, SIDE)
    targets[:, :, 30:90, 30:90] = 1
    batch = torch.rand(2, 3, SIDE, SIDE), targets, *first_clicks(targets)
    with torch.no_grad():
        logits = [logits for logits, _ in clicked(Watched(), batch)]
    assert len(seen) == ROUNDS
    assert not seen[0].any()
    for before, after in zip(logits[:-1], seen[1:], strict=True):
        assert torch.equal(after, (before > 0).float())
