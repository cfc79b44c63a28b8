"""Trains the transformer and its text encoders: python -m training.train_transformer --photos DIR --vae DIR

Stage `flow` learns the picture: flow matching on masked photographs, captions dropped now and then, the guidance
embedding held at 1. Stage `distil` then teaches the guidance embedding what classifier-free guidance of that scale
would have answered, so that serving needs one branch instead of two. Both write a FluxFillPipeline folder.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch._dynamo
from diffusers import AutoencoderTiny, FluxTransformer2DModel
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Generator, Tensor

from instgenie.bench.photos import Photos, PhotoSplit, load_photos
from training.alignment import Alignment
from training.attention import MaskedAttention, choose_kernel
from training.data import vocabulary
from training.distillation import Distillation
from training.examples import Captions, ExampleSource
from training.feed import MAX_TOKENS, SIZES, Feed, Inputs
from training.guidance import Guidance
from training.model import Model, flow_loss
from training.optim import Average, Clock, Muon, block_matrices, load_checkpoint, save_checkpoint, set_rate
from training.pipeline import (
    NUM_TEXT_TOKENS,
    Tokenizers,
    build_text_encoders,
    build_tokenizers,
    build_transformer,
    inherit,
    load_text,
    save_pipeline,
    wait_for,
)
from training.scenes import load_scenes, with_scenes


@dataclass
class Stage:
    """What a stage makes small, by which figure its weights are judged, and how they change."""

    loss: Callable[[Model, Inputs, float], Tensor]  # the float is the share of the training time that is used
    judge: Callable[[Model, Sequence[Inputs]], float]
    judged_by: str  # what the judge's figure is called
    optimisers: list[torch.optim.Optimizer]
    decay: float  # of the average of the weights, per step


def plain_loss(model: Model, inputs: Inputs, share: float) -> Tensor:
    return flow_loss(model, inputs)


def held_out_loss(model: Model, batches: Sequence[Inputs]) -> float:
    return sum(float(flow_loss(model, inputs).detach()) for inputs in batches) / len(batches)


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    generator = Generator(args.device).manual_seed(args.seed)
    photos, held_out = (load_pictures(args, split) for split in ("train", "val"))
    captions = Captions(photos)
    vae = load_vae(args)
    fast_vae = FastEncoder(load_vae(args), args.compile) if args.device == "cuda" else vae
    feed = Feed(ExampleSource(photos, captions, generator), fast_vae, args.batch)
    if args.wait:
        wait_for(Path(args.init))
    model, tokenizers = build(photos, captions, args)
    prepare_attention(model, args.batch, args.device)
    judged = held_out_inputs(held_out, captions, vae, args.batch, args.device)
    if args.stage == "flow":
        alignment = None if args.init or args.inherit else Alignment(model, photos.pictures)  # helps only at the start
        loss = alignment.with_loss(flow_loss) if alignment else plain_loss
        stage = Stage(loss, held_out_loss, "held-out loss", make_optimisers(model), 0.9995)
        trainer = Trainer(model, stage, feed, judged, args)
        if args.profile:
            return trainer.profile()
        trainer.run()
        if alignment:
            alignment.remove()
    else:
        teacher, _ = build(photos, captions, args)
        model.clip.requires_grad_(False)
        model.t5.requires_grad_(False)
        distillation = Distillation(teacher, Guidance(args.none_above, args.full_below), generator)
        optimisers = make_optimisers(model, args.matrix_rate, rest_rate=0.8)
        stage = Stage(distillation.loss, distillation.missed, "share of guidance missed", optimisers, 0.998)
        Trainer(model, stage, feed, judged, args).run()
    save_pipeline(Path(args.out) / "pipeline", vae, model.transformer, (model.clip, model.t5), tokenizers)


def load_pictures(args: argparse.Namespace, split: PhotoSplit) -> Photos:
    photos = load_photos(args.photos, split, args.limit)
    return with_scenes(photos, load_scenes(args.scenes, split, args.limit)) if args.scenes else photos


def load_vae(args: argparse.Namespace) -> AutoencoderTiny:
    vae = AutoencoderTiny.from_pretrained(args.vae, dtype=torch.float32)
    return vae.to(args.device).requires_grad_(False)


class FastEncoder:
    """The autoencoder's encoder at half precision with the same interface, compiled for the commonest size."""

    def __init__(self, vae: AutoencoderTiny, compiled: bool) -> None:
        vae = vae.to(torch.bfloat16, memory_format=torch.channels_last)
        self.vae, self.config = vae, vae.config
        self.square = torch.compile(vae.encode) if compiled else vae.encode

    def encode(self, pictures: Tensor) -> AutoencoderTinyOutput:
        encode = self.square if pictures.shape[-2:] == SIZES[0] else self.vae.encode
        return encode(pictures.to(torch.bfloat16, memory_format=torch.channels_last))


def build(photos: Photos, captions: Captions, args: argparse.Namespace) -> tuple[Model, Tokenizers]:
    """A fresh model, or the one of a pipeline folder; a fresh one may inherit weights of a folder of another shape."""
    if args.init:
        encoders, tokenizers = load_text(Path(args.init))
        transformer = FluxTransformer2DModel.from_pretrained(Path(args.init) / "transformer", dtype=torch.float32)
    else:
        tokenizers = build_tokenizers(vocabulary(photos))
        encoders, transformer = build_text_encoders(*tokenizers), build_transformer()
        if args.inherit:
            inherit(transformer, encoders, tokenizers, Path(args.inherit))
    model = Model(transformer, encoders, tokenizers, captions).to(args.device).train()
    model.transformer.set_attn_processor(MaskedAttention())
    if args.compile:
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    return model, tokenizers


def half_precision(device: torch.device) -> torch.autocast:
    """bfloat16 products on a GPU; a CPU may have none."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def prepare_attention(model: Model, batch: int, device: str) -> None:
    """On a GPU, choose the kernel of attention for batches of so many examples."""
    if device == "cuda":
        config, length = model.transformer.config, model.t5_ids.shape[1] + MAX_TOKENS
        kernel = choose_kernel(batch, length, config.num_attention_heads, config.attention_head_dim)
        print(f"attention: {kernel}", flush=True)


class Trainer:
    """The training loop: draw, learn, average; at intervals report, validate and save."""

    def __init__(self, model: Model, stage: Stage, feed: Feed, judged: list[Inputs], args: argparse.Namespace) -> None:
        self.model, self.stage, self.feed, self.judged, self.args = model, stage, feed, judged, args
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimisers, self.average = stage.optimisers, Average(self.parameters, stage.decay)
        self.clock, self.step, self.losses = Clock(args.minutes), 0, list[float]()
        self.checkpoint = Path(args.out) / "checkpoint.safetensors"
        if self.checkpoint.exists():
            state = self.parameters, self.average, self.optimisers, self.clock
            self.step = load_checkpoint(self.checkpoint, *state)

    def run(self) -> None:
        """Train until the time is up and leave the averaged weights in the model."""
        columns = *Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[note]}")
        path = Path(self.args.out) / "curve.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Progress(*columns) as progress, open(path, "a", encoding="utf-8") as curve:
            task = progress.add_task(self.args.stage, total=1.0, note="")
            # what to begin from: examples, and with them losses, change from version to version
            progress.console.print(self.judge(curve))
            while not self.clock.done:
                self.learn(self.feed.next())
                if self.step % 100 == 0:
                    progress.update(task, completed=self.clock.share, note=self.note(curve))
                if self.step % self.args.judge_every == 0:
                    progress.console.print(self.judge(curve))
                if self.args.checkpoint_every and self.step % self.args.checkpoint_every == 0:
                    self.save()
        self.average.swap()

    def profile(self, num_steps: int = 20) -> None:
        """Print the time of the parts of a step, after a warm-up."""
        for _ in range(10):
            self.learn(self.feed.next())
        with torch.profiler.profile() as profiler:
            for _ in range(num_steps):
                self.learn(self.feed.next())
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=order, row_limit=30))

    def learn(self, inputs: Inputs) -> None:
        set_rate(self.optimisers, self.clock.rate(hold=0.6))
        with half_precision(inputs.clean.device):
            loss = self.stage.loss(self.model, inputs, self.clock.share)
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.average.update()
        self.step += 1
        if self.step % 10 == 0:
            self.losses.append(float(loss.detach()))

    def note(self, curve: TextIO) -> str:
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        curve.write(f"{self.step},{self.clock.elapsed:.1f},training,{loss:.5f}\n")
        return f"step {self.step} loss {loss:.4f}"

    def judge(self, curve: TextIO) -> str:
        """The stage's figure on fixed held-out batches, under the averaged weights.

        Gradients stay on, so that the graph compiled for training serves.
        """
        self.average.swap()
        with half_precision(self.judged[0].clean.device):
            figure = self.stage.judge(self.model, self.judged)
        self.average.swap()
        curve.write(f"{self.step},{self.clock.elapsed:.1f},held out,{figure:.5f}\n")
        rate = self.step * self.args.batch / self.clock.elapsed
        return f"step {self.step} {self.clock.elapsed:.0f} s {rate:.0f} examples/s {self.stage.judged_by} {figure:.4f}"

    def save(self) -> None:
        save_checkpoint(self.checkpoint, self.parameters, self.average, self.optimisers, self.clock, self.step)


def make_optimisers(model: Model, matrix_rate: float = 1.0, rest_rate: float = 1.0) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest; rates are shares of the full learning rates."""
    matrices = block_matrices(model.transformer)
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    adamw = torch.optim.AdamW(rest, lr=6e-4 * rest_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [Muon(matrices, lr=1e-3 * matrix_rate), adamw]


def held_out_inputs(
    photos: Photos,
    captions: Captions,
    vae: AutoencoderTiny,
    batch: int,
    device: str,
    num_text: int = NUM_TEXT_TOKENS,
    source: type[ExampleSource] = ExampleSource,
) -> list[Inputs]:
    """Four fixed batches of held-out photographs, with captions as rows of the training table."""
    own = Captions(photos)
    feed = Feed(source(photos, own, Generator(device).manual_seed(1)), vae, batch, num_text)
    rows = {text: row for row, text in enumerate(captions.texts)}
    batches = [feed.next() for _ in range(4)]
    for inputs in batches:
        inputs.texts = inputs.texts.new_tensor([rows.get(own.texts[t], 0) for t in inputs.texts.tolist()])
    return batches


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, help="folder of captions.csv and its tar shards")
    parser.add_argument("--vae", required=True, help="folder of the trained autoencoder")
    parser.add_argument("--stage", choices=("flow", "distil"), default="flow")
    parser.add_argument("--scenes", help="folder of scenes.csv and its tar shards: backgrounds without captions")
    parser.add_argument("--init", help="pipeline folder to start from; the teacher of stage distil")
    parser.add_argument("--wait", action="store_true", help="read the photographs first, then wait for --init")
    parser.add_argument("--inherit", help="pipeline folder of another shape whose matching weights a fresh model takes")
    rule = Guidance()
    parser.add_argument("--none-above", type=float, default=rule.none_above, help="time above which no guidance acts")
    parser.add_argument("--full-below", type=float, default=rule.full_below, help="time below which all of it acts")
    matrix_help = "share of its full learning rate that a block's matrices have in stage distil; the rest has .8"
    parser.add_argument("--matrix-rate", type=float, default=0.6, help=matrix_help)
    parser.add_argument("--out", default="runs/transformer")
    parser.add_argument("--minutes", type=float, default=16)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--judge-every", type=int, default=500)
    parser.add_argument("--checkpoint-every", type=int, default=2000)
    parser.add_argument("--limit", type=int, help="number of photographs to read, for a quick try")
    parser.add_argument("--profile", action="store_true", help="print the time of the parts of a flow step and stop")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.wait and not args.init:
        parser.error("--wait waits for the folder of --init, which is not given")
    return args


if __name__ == "__main__":
    main()
