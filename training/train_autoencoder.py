"""Trains the autoencoder: python -m training.train_autoencoder --photos DIR --out runs/autoencoder

Loss: L1 + MSE + LPIPS + a pull of every latent channel towards zero mean and unit variance. Latents are noised now and
then, so that the decoder forgives small errors of the transformer; every fourth step decodes the pooled latents into
the half-size picture, which keeps the latent space smooth.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Generator, Tensor

from instgenie.bench.metrics import Lpips, psnr, ssim
from instgenie.bench.photos import load_photos
from training.optim import Average, Clock, load_checkpoint, save_checkpoint, set_rate
from training.pipeline import build_autoencoder


def main() -> None:
    args = parse()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    photos, held_out = (load_photos(args.photos, s, args.limit) for s in ("train", "val"))
    pictures, held_out_pictures = photos.pictures.to(device), held_out.pictures.to(device)
    vae = build_autoencoder().to(device, memory_format=torch.channels_last)
    lpips = Lpips().to(device, memory_format=torch.channels_last).requires_grad_(False)
    parameters = list(vae.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-3, fused=True)
    average, clock = Average(parameters, 0.999), Clock(args.minutes)
    generator = Generator(device).manual_seed(args.seed)
    checkpoint, step = Path(args.out) / "checkpoint.safetensors", 0
    if checkpoint.exists():
        step = load_checkpoint(checkpoint, parameters, average, [optimiser], clock)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[note]}")) as progress:
        task = progress.add_task("autoencoder", total=1.0, note="")
        while not clock.done:
            set_rate([optimiser], clock.rate(hold=0.3))
            crops = random_crops(pictures, args.batch, args.crop, generator)
            with torch.autocast(device.type, torch.bfloat16):
                loss = autoencoder_loss(vae, lpips, crops, step, generator)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            average.update()
            step += 1
            if step % 100 == 0:
                progress.update(task, completed=clock.share, note=f"step {step} loss {float(loss.detach()):.4f}")
            if step % 2000 == 0:
                average.swap()
                print(f"step {step} {clock.elapsed:.0f} s", *measure(vae, held_out_pictures[:256]))
                average.swap()
                save_checkpoint(checkpoint, parameters, average, [optimiser], clock, step)
    average.swap()
    set_latent_scale(vae, pictures[:: max(1, len(pictures) // 512)])
    print("held out: PSNR {:.2f} SSIM {:.4f}".format(*measure(vae, held_out_pictures)), "steps", step)
    vae.save_pretrained(Path(args.out) / "vae")


def autoencoder_loss(vae: AutoencoderTiny, lpips: Lpips, crops: Tensor, step: int, generator: Generator) -> Tensor:
    latents = vae.encoder(crops)
    spread = latents.float()
    mean, variance = spread.mean((0, 2, 3)), spread.var((0, 2, 3))
    level = 0.25 * torch.rand(len(crops), 1, 1, 1, generator=generator, device=crops.device)
    level = level * (torch.rand(level.shape, generator=generator, device=crops.device) < 0.6)
    noise = torch.randn(latents.shape, generator=generator, device=crops.device)
    if step % 4 == 3:
        latents, crops = F.avg_pool2d(latents, 2), F.avg_pool2d(crops, 2)
        noise = noise[..., ::2, ::2]
    decoded = vae.decoder(latents + level * noise).float()
    pixel = F.l1_loss(decoded, crops) + F.mse_loss(decoded, crops)
    return (
        pixel
        + 0.5 * lpips(decoded / 2 + 0.5, crops / 2 + 0.5).mean()
        + 0.05 * (mean.square() + (variance - 1).square()).mean()
    )


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
def measure(vae: AutoencoderTiny, pictures: Tensor) -> tuple[float, float]:
    """Mean PSNR and SSIM over whole pictures."""
    values = []
    for chunk in pictures.split(32):
        original = chunk.float() / 255
        decoded = vae.decode(vae.encode(original * 2 - 1).latents).sample.clamp(-1, 1)
        values.append(torch.stack([psnr(decoded / 2 + 0.5, original), ssim(decoded / 2 + 0.5, original)]))
    both = torch.cat(values, 1).mean(1)
    return float(both[0]), float(both[1])


@torch.no_grad()
def set_latent_scale(vae: AutoencoderTiny, pictures: Tensor) -> None:
    """One shift and one scale that bring the latents to zero mean and unit variance."""
    latents = torch.cat([vae.encode(c.float() / 127.5 - 1).latents for c in pictures.split(64)])
    vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=1 / float(latents.std()))
    print(
        "channel means",
        *(f"{m:.2f}" for m in latents.mean((0, 2, 3))),
        "stds",
        *(f"{s:.2f}" for s in latents.std((0, 2, 3))),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, help="folder of captions.csv and its tar shards")
    parser.add_argument("--out", default="runs/autoencoder")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=128)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--limit", type=int, help="number of photographs to read, for a quick try")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
