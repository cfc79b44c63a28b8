"""A timeline of one step with ControlNets: in the process of the steps, one network after the other, and in processes
of their own, beside the UNet's encoder."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import ControlNetModel, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from rich.console import Console
from rich.table import Table
from transformers import CLIPTextModel

from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.bench.files import check_folder
from instgenie.bench.machine import describe_machine, machine_text
from instgenie.bench.timeline import Bar, Stream, Track, write_timelines
from instgenie.cluster.config import ControlConfig, ProcessConfig, ResolvedCache
from instgenie.cluster.launch import process_command
from instgenie.engine.controls import LocalControls, StepControls
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.jobs.job import Job
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.models.recipe import CLIP_TOKENS, clip_config, make_autoencoder, make_tokenizer
from instgenie.pictures.canny import canny
from instgenie.pictures.samples import sample_picture
from instgenie.telemetry.progress import show_status
from instgenie.types import ControlUse, Edit
from instgenie.workers.controls import RemoteControls, StepTimes

STEPS = 6
CONTROL_STREAMS: tuple[Stream, ...] = ("control", "control 2")


@dataclass(frozen=True)
class StepMoments:
    """A step, in seconds of `time.monotonic`."""

    start: float
    begun: float  # after it was asked for residuals; in one process they are computed by then
    end: float
    times: tuple[StepTimes, ...]  # of processes of ControlNets; none: there are none


def bench_controls(
    name: str | None,
    device: str,
    size: tuple[int, int],
    controlnets: Sequence[Path],
    timeline: Path | None,
    trace: Path | None,
) -> None:
    """Without a model, one with random weights is made, with two ControlNets."""
    for path in (timeline, trace):
        check_folder(path)
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as folder:
        if name is None:
            with show_status("making a random model"):
                name, controlnets = make_random(Path(folder))
        with show_status("loading the model"):
            model = load(name, device)
        tracks = [measure(model, size, controlnets[:num], Path(folder)) for num in range(1, len(controlnets) + 1)]
    title = f"One step with ControlNets, {size[1]}x{size[0]}, classifier-free guidance"
    about = f"ControlNets in the process of the steps, or in their own. {machine_text(describe_machine(model))}"
    found = [track for pair in tracks for track in pair]
    print_tracks(found, title, about)
    write_timelines(found, title, about, timeline, trace)


def measure(model: Model, size: tuple[int, int], controlnets: Sequence[Path], folder: Path) -> list[Track]:
    """Steps in one process, and with a process for each ControlNet."""
    job = make_job(model, size, controlnets)
    apart = run_steps(model, job, LocalControls(model))
    names = [control.use.name for control in job.controls]
    with running_services(model, len(controlnets), folder) as addresses:
        controls = RemoteControls(model, addresses, names)
        beside = run_steps(model, job, controls)
        controls.stop()
    count = f"{len(controlnets)} ControlNet{'s' if len(controlnets) > 1 else ''}"
    processes = f"{1 + len(controlnets)} processes"
    return [local_track(f"{count}, 1 process", apart), remote_track(f"{count}, {processes}", beside)]


def make_job(model: Model, size: tuple[int, int], controlnets: Sequence[Path]) -> Job:
    picture = sample_picture(size)
    registry = ControlNetRegistry({f"net-{number}": str(path) for number, path in enumerate(controlnets)})
    uses = registry.resolve([ControlUse(f"net-{number}", 0.8) for number in range(len(controlnets))])
    images = (canny(picture),) * len(uses)
    edit = Edit(picture, np.ones(size, np.bool_), "a red cat", steps=STEPS, guidance=7.5, size=size, controls=uses)
    return prepare(replace(edit, control_images=images), model)


def run_steps(model: Model, job: Job, controls: StepControls) -> StepMoments:
    """The median of all steps but the first, by its time."""
    job, engine = replace(job), Engine(model, controls=controls)
    controls.open(job)
    while not controls.is_open(job):
        time.sleep(0.01)
    engine.join(job)
    begun = [0.0]
    begin = controls.begin

    def timed_begin(jobs: Sequence[Job]) -> None:
        begin(jobs)
        begun.append(time.monotonic())

    controls.begin = timed_begin  # type: ignore[method-assign]
    steps = []
    while engine.jobs:
        start = time.monotonic()
        engine.step()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        times = tuple(controls.times) if isinstance(controls, RemoteControls) else ()
        steps.append(StepMoments(start, begun[-1], time.monotonic(), times))
    return sorted(steps[1:], key=lambda step: step.end - step.start)[len(steps[1:]) // 2]


def local_track(name: str, step: StepMoments) -> Track:
    ms = 1000 * (step.end - step.start)
    begun = 1000 * (step.begun - step.start)
    bars = [Bar("compute", "control", "ControlNets", 0.0, begun), Bar("compute", "unet", "UNet", begun, ms)]
    return Track(name, f"{ms:.1f} ms: the UNet starts after the ControlNets", ms, bars, ("compute",))


def remote_track(name: str, step: StepMoments) -> Track:
    def at(moment: float) -> float:
        return 1000 * (moment - step.start)

    needed, came = at(min(one.needed for one in step.times)), at(max(one.came for one in step.times))
    end, spans = at(step.end), [(at(one.started), at(one.ended)) for one in step.times]
    bars = [
        Bar("compute", "encoder", "encoder of the UNet", 0.0, needed),
        Bar("compute", "wait", "wait for residuals", needed, came),
        Bar("compute", "decoder", "decoder of the UNet", came, end),
        *(Bar(CONTROL_STREAMS[number], "control", "ControlNet", *span) for number, span in enumerate(spans)),
    ]
    hidden = sum(max(min(ended, needed) - max(started, 0.0), 0.0) for started, ended in spans)
    computed = sum(ended - started for started, ended in spans)
    waiting = came - needed
    about = f"{end:.1f} ms: {hidden:.1f} of {computed:.1f} ms of ControlNets beside the encoder, {waiting:.1f} waiting"
    return Track(name, about, end, bars, ("compute", *CONTROL_STREAMS[: len(spans)]))


@contextmanager
def running_services(model: Model, num_services: int, folder: Path) -> Iterator[list[str]]:
    """Processes of ControlNets on the model's device."""
    addresses = [f"ipc://{folder}/controls-{number}" for number in range(num_services)]
    dtype = str(model.dtype).removeprefix("torch.")
    processes = []
    for number, address in enumerate(addresses):
        config = ProcessConfig(
            name=f"{number}.controlnet.1",
            endpoint=f"ipc://{folder}/nobody",
            model="",
            device=str(model.device),
            dtype=dtype,
            max_batch_size=1,
            batching="continuous",
            cache=ResolvedCache(host_bytes=0),
            parent=os.getpid(),
            front_timeout=60.0,
            controls=ControlConfig(),
            control_address=address,
        )
        processes.append(subprocess.Popen(process_command("controlnet", config)))
    try:
        yield addresses
    finally:
        for process in processes:
            process.kill()
            process.wait()


def make_random(folder: Path) -> tuple[str, list[Path]]:
    """A small Stable Diffusion with random weights, and two ControlNets for it."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128, 256), layers_per_block=2, cross_attention_dim=256,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    StableDiffusionPipeline(
        unet=unet, vae=make_autoencoder(4), text_encoder=CLIPTextModel(clip_config(256)),
        tokenizer=make_tokenizer(CLIP_TOKENS), scheduler=DDIMScheduler(clip_sample=False), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder / "model")  # fmt: skip
    nets = [folder / f"controlnet-{number}" for number in range(2)]
    for net in nets:
        ControlNetModel.from_unet(unet).save_pretrained(net)
    return str(folder / "model"), nets


def print_tracks(tracks: Sequence[Track], title: str, about: str) -> None:
    table = Table(title=title, caption=about)
    for heading in ("ControlNets", "step ms", "waiting ms", "what"):
        table.add_column(heading, justify="left" if heading in ("ControlNets", "what") else "right")
    for track in tracks:
        waiting = sum(bar.end - bar.start for bar in track.bars if bar.what == "wait")
        table.add_row(track.name, f"{track.step_ms:.1f}", f"{waiting:.1f}", track.about)
    Console().print(table)
