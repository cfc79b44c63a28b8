"""Shared by the trainings of adapters: a frozen pipeline, examples for it, and a loop that fits new weights to it."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, FluxTransformer2DModel
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Generator, Tensor, nn

from instgenie.machine.model_folders import BUILTIN
from training.attention import MaskedAttention
from training.examples import Captions, ExampleSource
from training.feed import Feed, Inputs
from training.model import Model
from training.optim import Average, Clock, set_rate
from training.pipeline import load_text, wait_for
from training.train_transformer import half_precision, held_out_inputs, load_pictures, prepare_attention

REPORT_EVERY = 50  # steps

AdapterLoss = Callable[[Inputs], Tensor]


class Course(Clock):
    """The share of a training that is done, which ends after some minutes, or after a number of steps."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        super().__init__(minutes)
        self.steps, self.step = steps, 0

    @property
    def share(self) -> float:
        return max(super().share, self.step / self.steps if self.steps else 0)

    @property
    def done(self) -> bool:
        return self.share >= 1


class Ground:
    """What adapters are fitted to: a pipeline whose weights stay, training examples, and fixed held-out batches."""

    def __init__(self, args: argparse.Namespace, source: type[ExampleSource] = ExampleSource) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        photos, held_out = (load_pictures(args, split) for split in ("train", "val"))
        captions = Captions(photos)
        examples = source(photos, captions, Generator(args.device).manual_seed(args.seed))
        if args.wait:
            wait_for(Path(args.pipeline))
        self.vae = AutoencoderTiny.from_pretrained(Path(args.pipeline) / "vae", dtype=torch.float32)
        self.vae.to(args.device).requires_grad_(False)
        self.model = load_frozen(Path(args.pipeline), captions).to(args.device)
        prepare_attention(self.model, args.batch, args.device)
        num_text = self.model.t5_ids.shape[1]
        self.feed = Feed(examples, self.vae, args.batch, num_text)
        self.judged = held_out_inputs(held_out, captions, self.vae, args.batch, args.device, num_text, source)

    def fit(self, parameters: Sequence[nn.Parameter], loss_of: AdapterLoss, rate: float) -> tuple[float, float]:
        """Train until the time is up, or for a number of steps, and leave the averaged weights. Returns the loss of the
        held-out batches before and after."""
        args, weights = self.args, list(parameters)
        optimiser = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        average, before = Average(weights, 0.99), self.judge(loss_of)
        print(f"{sum(weight.numel() for weight in weights):,} new weights; held-out loss {before:.4f}", flush=True)
        columns = *Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[note]}")
        with Progress(*columns) as progress:
            task = progress.add_task("training", total=1.0, note="")
            course, losses = Course(args.minutes, args.steps), list[Tensor]()
            while not course.done:
                set_rate([optimiser], course.rate())
                inputs = self.feed.next()
                with half_precision(inputs.clean.device):
                    loss = loss_of(inputs)
                optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimiser.step()
                average.update()
                course.step += 1
                losses.append(loss.detach())
                if course.step % REPORT_EVERY == 0 or course.done:
                    note = f"step {course.step} loss {torch.stack(losses).mean():.4f}"
                    progress.console.print(f"{course.elapsed:.0f} s {note}")
                    progress.update(task, completed=course.share, note=note)
                    losses.clear()
        average.swap()
        after = self.judge(loss_of)
        print(f"{course.step} steps of {args.batch} examples; held-out loss {before:.4f} -> {after:.4f}", flush=True)
        return before, after

    @torch.no_grad()
    def judge(self, loss_of: AdapterLoss) -> float:
        with half_precision(self.judged[0].clean.device):
            return sum(float(loss_of(inputs)) for inputs in self.judged) / len(self.judged)


def load_frozen(folder: Path, captions: Captions) -> Model:
    """The transformer and text encoders of a pipeline folder in float32; nothing of them is trained."""
    encoders, tokenizers = load_text(folder)
    transformer = FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.float32)
    transformer.set_attn_processor(MaskedAttention())
    return Model(transformer, encoders, tokenizers, captions).eval().requires_grad_(False)


def adapter_arguments(description: str | None, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, help="folder of captions.csv and its tar shards")
    parser.add_argument("--scenes", help="folder of scenes.csv and its tar shards: backgrounds without captions")
    parser.add_argument("--pipeline", default=str(BUILTIN), help="the model that the adapter is for (the built-in one)")
    parser.add_argument("--wait", action="store_true", help="read the photographs first, then wait for --pipeline")
    parser.add_argument("--out", required=True, type=Path, help=out)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--limit", type=int, help="number of photographs to read, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser
