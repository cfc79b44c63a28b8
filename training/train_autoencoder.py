"""Train the autoencoder: python -m training.train_autoencoder --photos DIR [--scenes DIR] --out runs/autoencoder

The loss is L1 + MSE + LPIPS plus a pull of every latent channel towards zero mean and unit variance. After a third of
the run a patch discriminator joins in, which restores fur and cloth that the other terms smooth away. Noise on some
latents makes the decoder forgive small errors of the transformer. Every sixth step decodes the pooled latents into the
half-size picture, which keeps the latent space smooth. Crops of 128 and 256 pixels alternate.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from torch import Generator, Tensor

from instgenie.bench.metrics import Lpips, psnr, ssim
from instgenie.bench.photos import PhotoSplit, load_photos
from training.discriminator import Discriminator, balance, discriminator_loss
from training.optim import Average, Clock, load_checkpoint, save_checkpoint, set_rate
from training.pipeline import LATENT_CHANNELS, build_autoencoder
from training.scenes import load_scenes

ADVERSARIAL_FROM = 0.3  # share of the run after which the discriminator is heard
ADVERSARIAL_WEIGHT = 0.08  # of its gradient beside that of the other losses
NOTE_SECONDS = 30.0
STEPS_BETWEEN_CHECKPOINTS = 2000


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    pictures, held_out = load_pictures(args, "train").to(device), load_pictures(args, "val").to(device)
    print(f"{len(pictures)} pictures, {len(held_out)} held out", flush=True)
    vae = build_autoencoder(args.channels).to(device, memory_format=torch.channels_last)
    if args.init:
        known = AutoencoderTiny.from_pretrained(args.init)
        vae.load_state_dict(known.state_dict())
        vae.register_to_config(shift_factor=known.config.shift_factor, scaling_factor=known.config.scaling_factor)
    if args.frozen_encoder:
        vae.encoder.requires_grad_(False)
    discriminator = Discriminator().to(device, memory_format=torch.channels_last)
    lpips = Lpips().to(device, memory_format=torch.channels_last).requires_grad_(False)
    parameters = list((vae.decoder if args.frozen_encoder else vae).parameters())
    judges = list(discriminator.parameters())
    optimisers = [
        torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-3, fused=True),
        torch.optim.AdamW(judges, lr=2e-4, betas=(0.5, 0.9), fused=True),
    ]
    average, clock = Average(parameters, 0.999), Clock(args.minutes)
    generator = Generator(device).manual_seed(args.seed)
    checkpoint, step, noted = Path(args.out) / "checkpoint.safetensors", 0, time.monotonic()
    if checkpoint.exists():
        step = load_checkpoint(checkpoint, parameters, average, optimisers[:1], clock)  # the discriminator starts anew
    last = vae.decoder.layers[-1].weight
    while not clock.done:
        set_rate(optimisers, clock.rate(hold=0.3))
        num, size = (args.batch // 4, 2 * args.crop) if step % 3 == 2 else (args.batch, args.crop)
        crops = random_crops(pictures, num, size, generator).to(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss, decoded, target = reconstruction_loss(vae, lpips, args.lpips_weight, crops, step, generator)
            is_judged = clock.share > ADVERSARIAL_FROM
            if is_judged:
                adversarial = -discriminator(decoded).mean()
                loss = loss + ADVERSARIAL_WEIGHT * balance(loss, adversarial, last) * adversarial
        optimisers[0].zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimisers[0].step()
        if clock.share > ADVERSARIAL_FROM / 2:  # it learns before it is heard
            with torch.autocast(device.type, torch.bfloat16):
                judged = discriminator_loss(discriminator, target, decoded)
            optimisers[1].zero_grad()
            judged.backward()
            optimisers[1].step()
        average.update()
        step += 1
        if step % STEPS_BETWEEN_CHECKPOINTS == 0:
            save_checkpoint(checkpoint, parameters, average, optimisers[:1], clock, step)
        if step % 50 == 0 and time.monotonic() - noted > NOTE_SECONDS:
            noted = time.monotonic()
            average.swap()
            figures = measure(vae, lpips, held_out[:: max(1, len(held_out) // 128)])
            average.swap()
            print(f"step {step} {clock.elapsed:.0f} s loss {float(loss.detach()):.4f} " + say(figures), flush=True)
    average.swap()
    if not args.frozen_encoder:
        set_latent_scale(vae, pictures[:: max(1, len(pictures) // 512)])
    print("held out:", say(measure(vae, lpips, held_out)), "steps", step, flush=True)
    vae.save_pretrained(Path(args.out) / "vae")


def load_pictures(args: argparse.Namespace, split: PhotoSplit) -> Tensor:  # [N, 3, 256, 256] uint8
    parts = [load_photos(args.photos, split, args.limit).pictures]
    if args.scenes:
        parts.append(load_scenes(args.scenes, split, args.limit))
    return torch.cat(parts)


def reconstruction_loss(
    vae: AutoencoderTiny, lpips: Lpips, lpips_weight: float, crops: Tensor, step: int, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the decoded pictures and what they should be."""
    latents = vae.encoder(crops)
    spread = latents.float()
    mean, variance = spread.mean((0, 2, 3)), spread.var((0, 2, 3))
    level = 0.2 * torch.rand(len(crops), 1, 1, 1, generator=generator, device=crops.device)
    level = level * (torch.rand(level.shape, generator=generator, device=crops.device) < 0.4)
    noise = torch.randn(latents.shape, generator=generator, device=crops.device)
    if step % 6 == 4:
        latents, crops = F.avg_pool2d(latents, 2), F.avg_pool2d(crops, 2)
        noise = noise[..., ::2, ::2]
    decoded = vae.decoder(latents + level * noise).float()
    loss = (
        F.l1_loss(decoded, crops)
        + F.mse_loss(decoded, crops)
        + lpips_weight * lpips(decoded / 2 + 0.5, crops / 2 + 0.5).mean()
        + 0.05 * (mean.square() + (variance - 1).square()).mean()
    )
    return loss, decoded, crops


def random_crops(pictures: Tensor, num: int, size: int, generator: Generator) -> Tensor:
    """[num, 3, size, size] in [-1, 1], flipped half of the time."""
    high = pictures.shape[-1] - size + 1
    rows, top, left, flip = (
        torch.randint(n, (num,), generator=generator, device=pictures.device) for n in (len(pictures), high, high, 2)
    )
    span = torch.arange(size, device=pictures.device)
    columns = torch.where(flip[:, None] == 1, left[:, None] + span, left[:, None] + span.flip(0))
    crops = pictures[rows[:, None, None], :, (top[:, None] + span)[:, :, None], columns[:, None, :]]
    return crops.permute(0, 3, 1, 2).float().div(127.5).sub(1)


@torch.no_grad()
def measure(vae: AutoencoderTiny, lpips: Lpips, pictures: Tensor) -> tuple[float, float, float]:
    """Mean PSNR, SSIM and LPIPS over whole pictures."""
    values = []
    for chunk in pictures.split(32):
        original = chunk.float() / 255
        decoded = vae.decode(vae.encode(original * 2 - 1).latents).sample.clamp(-1, 1) / 2 + 0.5
        values.append(torch.stack([psnr(decoded, original), ssim(decoded, original), lpips(decoded, original)]))
    first, second, third = torch.cat(values, 1).mean(1).tolist()
    return first, second, third


def say(figures: tuple[float, float, float]) -> str:
    return "PSNR {:.2f} SSIM {:.4f} LPIPS {:.4f}".format(*figures)


@torch.no_grad()
def set_latent_scale(vae: AutoencoderTiny, pictures: Tensor) -> None:
    """One shift and one scale that bring the latents to zero mean and unit variance."""
    latents = torch.cat([vae.encode(c.float() / 127.5 - 1).latents for c in pictures.split(64)])
    vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=1 / float(latents.std()))
    print("channel means", *(f"{m:.2f}" for m in latents.mean((0, 2, 3))))
    print("channel stds", *(f"{s:.2f}" for s in latents.std((0, 2, 3))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, help="folder of captions.csv and its tar shards")
    parser.add_argument("--scenes", help="folder of scenes.csv and its tar shards: backgrounds without captions")
    parser.add_argument("--out", default="runs/autoencoder")
    parser.add_argument("--init", help="folder of an autoencoder of the same shape to go on from")
    parser.add_argument("--channels", type=int, default=LATENT_CHANNELS, help="latent channels")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=128)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--lpips-weight", type=float, default=1.0, help="of LPIPS beside L1 + MSE")
    parser.add_argument(
        "--frozen-encoder",
        action="store_true",
        help="train the decoder alone: the transformer's latents stay as they are",
    )
    parser.add_argument("--limit", type=int, help="photographs to read, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
