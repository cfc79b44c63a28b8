"""Trains the transformer and its text encoders: python -m training.train_transformer --photos DIR --vae runs/autoencoder/vae

Stage `flow` learns the picture: flow matching on masked photographs, captions dropped now and then, the guidance embedding
held at 1. Stage `distil` then teaches the guidance embedding what classifier-free guidance of that scale would have
answered, so that serving needs one branch instead of two. Both write a FluxFillPipeline folder.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo
from diffusers import AutoencoderTiny, FluxTransformer2DModel
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Generator, Tensor, nn

from training.alignment import Alignment
from training.attention import MaskedAttention
from training.data import Photos, load_photos, vocabulary
from training.examples import Captions, Examples, ExampleSource
from training.latents import condition, encode, image_ids, token_masks
from training.optim import Average, Clock, Muon, block_matrices, load_checkpoint, save_checkpoint, set_rate
from training.pipeline import (
    NUM_TEXT_TOKENS,
    build_text_encoders,
    build_tokenizers,
    build_transformer,
    load_text,
    save_pipeline,
    token_ids,
)

SIZES = ((256, 256), (224, 288), (288, 224))  # square, and about 4:3 both ways
SIZE_SHARES = (0.7, 0.15, 0.15)
MAX_TOKENS = 256
ISOLATED_SHARE = 0.3  # examples whose unmasked tokens see unmasked tokens only, as cached activations do
STOCK_SHARE = 0.4  # examples conditioned as FluxFillPipeline does it: greyed latents for unmasked tokens too
UNMASKED_WEIGHT = 0.3
MAX_GUIDANCE = 7.0


@dataclass
class Inputs:
    """One batch as the transformer takes it."""

    clean: Tensor  # [B, N, 4C]
    noisy: Tensor  # [B, N, 4C]
    noise: Tensor  # [B, N, 4C]
    times: Tensor  # [B]
    known: Tensor  # [B, N, 4C + 256]
    masked: Tensor  # [B, N] bool
    attention: Tensor  # [B, 1, T + N, T + N] bool
    texts: Tensor  # [B] caption rows
    places: Tensor  # [N, 3]
    examples: Examples
    num_tokens: int  # without padding


class Model(nn.Module):
    """The transformer with its text encoders, over rows of a caption table."""

    def __init__(self, transformer: FluxTransformer2DModel, encoders, tokenizers, captions: Captions) -> None:
        super().__init__()
        self.transformer, self.clip, self.t5 = transformer, *encoders
        for name, tokenizer in zip(("clip_ids", "t5_ids"), tokenizers, strict=True):
            self.register_buffer(name, token_ids(tokenizer, captions.texts), persistent=False)

    def forward(self, inputs: Inputs, texts: Tensor, guidance: Tensor) -> Tensor:
        sequence = self.t5(self.t5_ids[texts]).last_hidden_state
        return self.transformer(
            hidden_states=torch.cat([inputs.noisy, inputs.known], -1),
            encoder_hidden_states=sequence,
            pooled_projections=self.clip(self.clip_ids[texts]).pooler_output,
            timestep=inputs.times,
            guidance=guidance,
            img_ids=inputs.places,
            txt_ids=torch.zeros(NUM_TEXT_TOKENS, 3, device=texts.device),
            joint_attention_kwargs={"attention_mask": inputs.attention},
            return_dict=False,
        )[0]


class Feed:
    """Turns examples into transformer inputs: encodes, noises, hides."""

    def __init__(self, source: ExampleSource, vae: AutoencoderTiny, batch: int) -> None:
        self.source, self.vae, self.batch, self.generator = source, vae, batch, source.generator

    @torch.no_grad()
    def next(self) -> Inputs:
        shares = torch.tensor(SIZE_SHARES)
        height, width = SIZES[int(torch.multinomial(shares, 1))]
        return self.inputs(self.source.draw(self.batch, height, width))

    @torch.no_grad()
    def inputs(self, examples: Examples) -> Inputs:
        num, height, width = examples.masks.shape
        greyed = examples.pictures * ~examples.masks[:, None]
        clean, greyed = encode(self.vae, torch.cat([examples.pictures, greyed])).float().chunk(2)
        masked = token_masks(examples.masks)
        stock = self._chance(num, STOCK_SHARE)
        known = condition(clean, greyed, examples.masks, masked | stock[:, None])
        num_tokens, clean, masked = clean.shape[1], pad_tokens(clean), pad_tokens(masked)
        noise = torch.randn(clean.shape, generator=self.generator, device=clean.device)
        # The transformer casts its timestep to bfloat16: draw one that survives the cast.
        spread = torch.randn(num, generator=self.generator, device=clean.device)
        times = torch.sigmoid(spread + 0.1).to(torch.bfloat16).float()
        return Inputs(
            clean=clean,
            noisy=torch.lerp(clean, noise, times[:, None, None]),
            noise=noise,
            times=times,
            known=pad_tokens(known),
            masked=masked,
            attention=attention_mask(masked, self._chance(num, ISOLATED_SHARE), num_tokens),
            texts=examples.texts,
            places=pad_tokens(image_ids(height, width, clean.device)[None])[0],
            examples=examples,
            num_tokens=num_tokens,
        )

    def _chance(self, num: int, share: float) -> Tensor:
        return torch.rand(num, generator=self.generator, device=self.generator.device) < share


def attention_mask(masked: Tensor, isolated: Tensor, num_tokens: int) -> Tensor:
    """[B, 1, T + N, T + N]: in an isolated example an unmasked token sees unmasked tokens only; padding is unseen."""
    unmasked = torch.cat([masked.new_zeros(len(masked), NUM_TEXT_TOKENS), ~masked], 1)
    hidden = isolated[:, None, None] & unmasked[:, :, None] & ~unmasked[:, None, :]
    length = NUM_TEXT_TOKENS + num_tokens
    hidden[:, :length, length:] = True
    return ~hidden[:, None]


def pad_tokens(x: Tensor) -> Tensor:
    """[B, N, ...] -> [B, MAX_TOKENS, ...]: pictures of every shape share one compiled graph."""
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, MAX_TOKENS - x.shape[1]))


def flow_loss(model: Model, inputs: Inputs) -> Tensor:
    velocity = model(inputs, inputs.texts, torch.ones_like(inputs.times))
    return weighted_error(velocity, inputs.noise - inputs.clean, inputs)


def weighted_error(prediction: Tensor, target: Tensor, inputs: Inputs) -> Tensor:
    weight = torch.where(inputs.masked, 1.0, UNMASKED_WEIGHT)
    weight[:, inputs.num_tokens :] = 0
    return ((prediction.float() - target).square().mean(-1) * weight).sum() / weight.sum()


class Distillation:
    """The teacher's guided answer as the student's target, for a guidance scale drawn per example."""

    def __init__(self, teacher: Model, generator: Generator) -> None:
        self.teacher, self.generator = teacher.requires_grad_(False).eval(), generator

    def loss(self, student: Model, inputs: Inputs, share: float) -> Tensor:
        num = len(inputs.times)
        guidance = 1 + (MAX_GUIDANCE - 1) * torch.rand(num, generator=self.generator, device=inputs.times.device)
        with torch.no_grad():
            one = torch.ones_like(guidance)
            said, unsaid = (self.teacher(inputs, t, one).float() for t in (inputs.texts, torch.zeros_like(inputs.texts)))
            target = unsaid + guidance[:, None, None] * (said - unsaid)
        return weighted_error(student(inputs, inputs.texts, guidance), target, inputs)


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    out, generator = Path(args.out), Generator(device).manual_seed(args.seed)
    photos, held_out = (load_photos(args.photos, s, args.limit) for s in ("train", "val"))
    captions = Captions(photos)
    vae = AutoencoderTiny.from_pretrained(args.vae).to(device, torch.float32).requires_grad_(False)
    fast_vae = AutoencoderTiny.from_pretrained(args.vae).to(device, torch.bfloat16, memory_format=torch.channels_last)
    model, tokenizers = build(photos, captions, args, device)
    feed = Feed(ExampleSource(photos, captions, generator), FastEncoder(fast_vae, args.compile), args.batch)
    judge = Feed(ExampleSource(held_out, Captions(held_out), Generator(device).manual_seed(1)), vae, args.batch)
    loss: Callable[[Model, Inputs, float], Tensor]
    if args.stage == "flow":
        alignment = Alignment(model.transformer, photos.pictures)
        model.alignment = alignment.projector

        def loss(model: Model, inputs: Inputs, share: float) -> Tensor:
            return flow_loss(model, inputs) + alignment.loss(inputs.examples, share)

    else:
        teacher, _ = build(photos, captions, args, device)
        loss = Distillation(teacher, generator).loss
        model.clip.requires_grad_(False), model.t5.requires_grad_(False)
    train(model, loss, feed, judge, captions, args)
    if args.stage == "flow":
        alignment.detach(model.transformer)
    save_pipeline(out / "pipeline", vae, model.transformer, (model.clip, model.t5), tokenizers)


class FastEncoder:
    """The autoencoder's encoder at half precision behind the same face; compiled for the commonest size."""

    def __init__(self, vae: AutoencoderTiny, compiled: bool) -> None:
        self.vae, self.config = vae.requires_grad_(False), vae.config
        self.square = torch.compile(vae.encode) if compiled else vae.encode

    def encode(self, pictures: Tensor):
        encode = self.square if pictures.shape[-2:] == SIZES[0] else self.vae.encode
        return encode(pictures.to(torch.bfloat16, memory_format=torch.channels_last))


def build(photos: Photos, captions: Captions, args: argparse.Namespace, device: torch.device):
    """A fresh model, or the one of a pipeline folder."""
    if args.init:
        encoders, tokenizers = load_text(Path(args.init))
        transformer = FluxTransformer2DModel.from_pretrained(Path(args.init) / "transformer", torch_dtype=torch.float32)
    else:
        tokenizers = build_tokenizers(vocabulary(photos))
        encoders, transformer = build_text_encoders(*tokenizers), build_transformer()
    model = Model(transformer, encoders, tokenizers, captions).to(device).train()
    model.transformer.set_attn_processor(MaskedAttention())
    if args.compile:
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    return model, tokenizers


def train(model: Model, loss_of, feed: Feed, judge: Feed, captions: Captions, args: argparse.Namespace) -> None:
    device, out = torch.device(args.device), Path(args.out)
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = block_matrices(model.transformer)
    chosen = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in chosen]
    scale = 0.4 if args.stage == "distil" else 1.0
    optimisers = [
        Muon(matrices, lr=1e-3 * scale),
        torch.optim.AdamW(rest, lr=6e-4 * scale, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]
    average, clock = Average(parameters, 0.9995 if args.stage == "flow" else 0.998), Clock(args.minutes)
    checkpoint, step, seen = out / "checkpoint.safetensors", 0, 0.0
    if checkpoint.exists():
        step = load_checkpoint(checkpoint, parameters, average, optimisers, clock)
    judged = [judge.next() for _ in range(4)] if args.stage == "flow" else []
    rows = {text: row for row, text in enumerate(captions.texts)}
    for inputs in judged:  # captions of the held-out split, as rows of the training table
        texts = [rows.get(judge.source.captions.texts[t], 0) for t in inputs.texts.tolist()]
        inputs.texts = torch.tensor(texts, device=device)
    curve = open_curve(out)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[note]}")) as progress:
        task = progress.add_task(args.stage, total=1.0, note="")
        while not clock.done:
            set_rate(optimisers, clock.rate())
            inputs = feed.next()
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, inputs, clock.share)
            for optimiser in optimisers:
                optimiser.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimiser in optimisers:
                optimiser.step()
            average.update()
            step, seen = step + 1, seen + float(loss.detach()) if step % 10 == 0 else seen
            if step % 100 == 0:
                progress.update(task, completed=clock.share, note=f"step {step} loss {seen / 10:.4f}")
                curve.write(f"{step},{clock.elapsed:.1f},{seen / 10:.5f},{float(norm):.3f},\n")
                seen = 0.0
            if step % args.judge_every == 0:
                average.swap()
                value = held_out_loss(model, judged, device) if judged else math.nan
                average.swap()
                curve.write(f"{step},{clock.elapsed:.1f},,,{value:.5f}\n")
                curve.flush()
                print(f"step {step} {clock.elapsed:.0f} s {step * args.batch / clock.elapsed:.0f}/s held out {value:.4f}", flush=True)
            if args.checkpoint_every and step % args.checkpoint_every == 0:
                save_checkpoint(checkpoint, parameters, average, optimisers, clock, step)
    average.swap()
    curve.close()


def open_curve(out: Path):
    out.mkdir(parents=True, exist_ok=True)
    new = not (out / "curve.csv").exists()
    curve = open(out / "curve.csv", "a", encoding="utf-8")
    if new:
        curve.write("step,seconds,training loss,gradient norm,held-out loss\n")
    return curve


def held_out_loss(model: Model, batches: list[Inputs], device: torch.device) -> float:
    """Mean loss of fixed held-out batches; with gradients on, so that the graph compiled for training serves."""
    with torch.autocast(device.type, torch.bfloat16):
        return sum(float(flow_loss(model, inputs).detach()) for inputs in batches) / len(batches)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, help="folder of captions.csv and its tar shards")
    parser.add_argument("--vae", required=True, help="folder of the trained autoencoder")
    parser.add_argument("--stage", choices=("flow", "distil"), default="flow")
    parser.add_argument("--init", help="pipeline folder to start from; the teacher of stage distil")
    parser.add_argument("--out", default="runs/transformer")
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--judge-every", type=int, default=500)
    parser.add_argument("--checkpoint-every", type=int, default=2000)
    parser.add_argument("--limit", type=int, help="photographs to read, for a quick try")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
