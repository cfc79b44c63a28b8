"""Edit pictures from Python: prepare, the step loop and finish in one process."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.adapters.shipped import shipped_controlnets, shipped_loras
from instgenie.adapters.tiers import LoraFetch
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.store import Found, Handle, Lookup, Store
from instgenie.cost.table import DEFAULT_COSTS
from instgenie.engine.changed import Changed, make_changed
from instgenie.engine.controls import LocalControls, control_shape
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.lora_shelf import LoraShelf, read_uses
from instgenie.engine.own import OwnActivations, can_reuse_own, reuse_found, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.pricing import SingleJob, priced
from instgenie.engine.register import can_reuse, make_activations, make_key, may_reuse, name_loras, register_in, reuse
from instgenie.errors import CacheError, EditError
from instgenie.jobs.activations import NUM_PARTS, CacheDtype, Key, Kind
from instgenie.jobs.job import Job
from instgenie.jobs.quality import DEFAULT, Quality, with_quality
from instgenie.jobs.strength import FROM_SURROUNDINGS, open_strength
from instgenie.machine.device_memory import memory_guard
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.control import read_controls
from instgenie.pictures.cropping import Canvas, choose_box, crop_edit
from instgenie.pictures.picture import check_edit, check_steps
from instgenie.scheduling.scheduler import FILL
from instgenie.types import (
    Box,
    Convolutions,
    Edit,
    OnBytes,
    OnStep,
    PixelMask,
    Pixels,
    Quantization,
    RegisterResult,
    Result,
    TextPadding,
    Timings,
    WeightsDtype,
)

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, eq=False)
class QueuedEdit:
    """A waiting edit. If its template is known, the activations are being loaded meanwhile."""

    edit: Edit
    loading: tuple[Key, Handle] | None
    lookup_seconds: float
    loras: LoraFetch | None = None  # that it asks for, on their way to the device


@dataclass(frozen=True, eq=False)
class PreparedEdit:
    """A job that may start."""

    job: Job
    found: Found | None  # activations of its template
    prepare_seconds: float
    load_seconds: float


class Editor:
    """
    editor = Editor()
    result = editor.edit(picture, mask, "a ginger cat")
    save_picture(result.picture, "cat.png")

    An edit reads what its own dense steps leave behind, and computes only its masked tokens at the others. After
    `editor.register(picture)`, edits of that picture read what the registration left. Such activations are kept in the
    tiers of `cache`, or without one in memory, next to the model. With cache_dtype fp8 they take half the bytes of
    bfloat16, with int4 less than a third, and are a little less exact. With a cache_stride of 4 every fourth step is
    registered and serves the three that follow: a quarter of the bytes and of the work. With text_padding reused, the
    padding of a prompt is read like unmasked tokens, and only the tokens of the prompt are computed. With quantization
    fp8 the network multiplies in eight bits, on GPUs that can. With weights_dtype fp8 large weights take one byte each,
    on any device. With convolutions reused, those of a UNet compute only the tiles that have masked tokens. With a
    reuse_changed above 0, steps whose predictions can be guessed are not computed: it is the probability of a wrong
    guess from which a step is computed. `on_bytes` is told how many bytes of weights are loaded, and of how many.

    `loras` gives names to LoRA files, and `lora_dir` is a folder whose files are named by their stems. An edit asks for
    them with `loras=[("pencil", 0.8)]`; a path is a name, too.

    `controlnets` gives names to folders of ControlNets. An edit asks for them with
    `controls=[{"name": "canny", "image": "canny", "scale": 0.8}]`, where the image is a picture, or canny for the
    edges of the edit's own. LoRAs and ControlNets that lie in the model's folder are there without being named.
    """

    cache_dtype: CacheDtype = "model"
    cache_stride: int = 1
    text_padding: TextPadding = "computed"
    _changed: Changed | None = None
    _loras: LoraShelf | None = None
    _controls: LocalControls | None = None
    _controlnets = ControlNetRegistry()

    def __init__(
        self,
        model: str = "builtin",
        device: str = "auto",
        dtype: str = "auto",
        cache: Store | None = None,
        cache_dtype: CacheDtype = "model",
        cache_stride: int = 1,
        text_padding: TextPadding = "computed",
        quantization: Quantization | None = None,
        convolutions: Convolutions = "dense",
        reuse_changed: float = 0.0,
        loras: Mapping[str, str] | None = None,
        lora_dir: str | None = None,
        controlnets: Mapping[str, str] | None = None,
        weights_dtype: WeightsDtype | None = None,
        on_bytes: OnBytes | None = None,
    ) -> None:
        self.model = load(
            model,
            device,
            dtype,
            quantization=quantization,
            convolutions=convolutions,
            weights_dtype=weights_dtype,
            on_bytes=on_bytes,
        )
        self.cache = cache
        self.cache_dtype = cache_dtype
        self.cache_stride = cache_stride
        self.text_padding = text_padding
        self._changed = make_changed(self.model, model, reuse_changed)
        self.store = cache or make_store(self.model.device)
        self._loras = LoraShelf(self.model, shipped_loras(model) | dict(loras or {}), lora_dir)
        self._controlnets = ControlNetRegistry(shipped_controlnets(model) | dict(controlnets or {}))

    @property
    def loras(self) -> LoraShelf:
        """The LoRAs that edits may name."""
        self._loras = self._loras or LoraShelf(self.model)
        return self._loras

    @property
    def controls(self) -> LocalControls:
        """The ControlNets in memory."""
        self._controls = self._controls or LocalControls(self.model)
        return self._controls

    def edit(self, picture: Pixels, mask: PixelMask, prompt: str, quality: Quality = DEFAULT, **options: Any) -> Result:
        """Edit one picture. Options are the other fields of `Edit`; steps and guidance default to those of the model,
        dense steps and halo to those of the quality, and the strength to 1, or less if the edit starts from the
        surroundings of its mask and the model is not trained to remove things."""
        uses: dict[str, Any] = {"loras": read_uses(options["loras"])} if "loras" in options else {}
        if "controls" in options:
            controls, images = read_controls(options["controls"], picture)
            uses |= {"controls": controls, "control_images": images}
        edit = Edit(picture, mask, prompt, **(self.suited(options) | uses))
        check_edit(edit)
        own = {name: options[name] for name in ("dense_steps", "halo", "own_steps", "max_change") if name in options}
        [result] = self.edit_many([replace(with_quality(edit, quality), **own)])
        return result

    def suited(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of an edit with those that the model chooses."""
        chosen: dict[str, Any] = {"steps": self.model.steps, "guidance": self.model.guidance, **options}
        is_open = chosen.get("masked_content") == "surroundings" and "strength" not in chosen
        if is_open and not self.model.removes:
            check_steps(chosen["steps"])
            strength, steps = open_strength(FROM_SURROUNDINGS * self.model.whole_strength, chosen["steps"])
            chosen |= {"strength": strength, "steps": steps}
        return chosen

    def register(
        self,
        picture: Pixels,
        size: tuple[int, int] | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        kind: Kind = "kv",
        on_step: OnStep | None = None,
        loras: Sequence[Any] = (),
        references: tuple[Pixels, ...] = (),
    ) -> RegisterResult:
        """Compute and keep the picture's activations. Edits with the same size, steps, guidance and references will use
        them. Steps that are already kept are not computed again. With LoRAs, the activations are for edits with the
        same ones; without, for all edits that find none of their own."""
        applied = self.loras.apply(read_uses(loras)) if loras else None
        with memory_guard("the activations of a template"):
            options = size, steps, guidance, kind, self.cache_dtype, on_step, self.cache_stride, self.keeps_text
            return register_in(self.store, picture, self.model, *options, applied, references)

    @property
    def keeps_text(self) -> bool:
        return self.text_padding == "reused"

    def edit_many(self, edits: Sequence[Edit], on_step: OnStep | None = None) -> list[Result]:
        """Edit several pictures. Edits take their steps together, however they differ. Results are in the order of the
        edits."""
        with memory_guard(f"a batch of {len(edits)} edits"):
            queued = [self._queue(edit) for edit in edits]
            prepared = [self._prepare(one) for one in queued]
            seconds = self._denoise([one.job for one in prepared], on_step)
            return [self._result(one, seconds[one.job]) for one in prepared]

    def _queue(self, edit: Edit) -> QueuedEdit:
        """Queue an edit and start to load its activations, so that they are there when the job may start."""
        check_edit(edit)
        edit = self._cropped(self._named(self.loras.resolve(edit) if edit.loras else edit))
        loras = self.loras.fetch(edit) if edit.loras else None
        if edit.reuse == "template":
            self._register_for(edit)
        if self.store.is_empty or not may_reuse(edit, self.model):
            return QueuedEdit(edit, None, 0.0, loras)
        key, seconds = self._timed(self._find, edit)
        return QueuedEdit(edit, (key, self.store.prefetch(key, self.model.device)) if key else None, seconds, loras)

    def _named(self, edit: Edit) -> Edit:
        """The edit with the folders of its ControlNets; a name that is a path stands for that folder."""
        if not edit.controls:
            return edit
        registry = self._controlnets
        registry.shape = control_shape(self.model)
        for use in edit.controls:
            if "/" in use.name:
                registry.open(use.name)
        return replace(edit, controls=registry.resolve(edit.controls))

    def _cropped(self, edit: Edit) -> Edit:
        """The edit of a crop, if it is to be one. The template of the whole picture stays in use where there is one, or
        where the edit insists on it, unless a crop is asked for."""
        box = self.choose_crop(edit)
        if not box or (edit.crop == "auto" and (edit.reuse == "template" or self._is_registered(edit))):
            return edit
        return crop_edit(edit, box)

    def choose_crop(self, edit: Edit) -> Box | None:
        """The crop that is edited unless a template of the whole picture is used; None: the whole picture."""
        canvas = Canvas(self.model.size_multiple, self.model.own_size, edit.size)
        return None if edit.whole else choose_box(edit.mask, canvas, edit.crop, edit.crop_padding)

    def _is_registered(self, edit: Edit) -> bool:
        return not self.store.is_empty and may_reuse(edit, self.model) and self._find(edit, self.model) is not None

    def _register_for(self, edit: Edit) -> None:
        """Register the picture of an edit that insists on activations, unless it is registered."""
        if not may_reuse(edit, self.model):
            what = f"{edit.dense_steps} of {edit.steps} steps are dense, and the mask covers {edit.mask.mean():.0%}"
            raise EditError(f"the edit cannot use a template: {what}")
        if self._find(edit, self.model) is None:
            self.register(edit.picture, edit.size, edit.steps, edit.guidance, references=edit.references)

    def _find(self, edit: Edit, model: Model) -> Key | None:
        """Find the edit's template in the store: first one that saw the same LoRAs, then the base model's; first one
        with rows for convolutions, then one without. If both kinds are there, `kv` is taken because it computes less.
        """
        key = make_key(edit, model, "kv", self.cache_dtype, self.cache_stride, self.keeps_text)
        own = name_loras([(lora.version, lora.scale) for lora in edit.loras])
        forms = dict.fromkeys(((own, 0 if own else key.tile), ((), key.tile), ((), 0)))
        keys = (replace(key, kind=kind, loras=loras, tile=tile) for loras, tile in forms for kind in NUM_PARTS)
        return next((key for key in keys if self.store.find(key) is not Lookup.MISS), None)

    def _prepare(self, queued: QueuedEdit) -> PreparedEdit:
        job, seconds = self._timed(self._make_job, queued)
        is_pinned = queued.edit.reuse == "template"
        if is_pinned and not can_reuse(job):
            raise EditError(f"the edit cannot use a template: the mask covers all {len(job.masked)} tokens")
        if not queued.loading or not can_reuse(job):
            job = reuse_own(job) if can_reuse_own(job) else job
            return PreparedEdit(job, None, seconds, queued.lookup_seconds)
        key, handle = queued.loading
        found, load_seconds = self._timed(lambda handle, _: handle.result(), handle)
        if is_pinned and not found:
            raise CacheError("the picture is registered, but its activations cannot be read or do not fit into memory")
        if found:
            job = reuse(job, make_activations(key, found.span, self.model))
        elif can_reuse_own(job):
            job = reuse_own(job)
        return PreparedEdit(job, found, seconds, queued.lookup_seconds + load_seconds)

    def _make_job(self, queued: QueuedEdit, model: Model) -> Job:
        job = prepare(queued.edit, model, None, self.loras.prompts if queued.loras else None)
        if queued.loras:
            self.loras.give(job, queued.loras)
        return job

    def _denoise(self, jobs: Sequence[Job], on_step: OnStep | None) -> dict[Job, float]:
        """Run the jobs to their end. Returns the seconds until each was handed over. A batch that does not fit into
        memory goes on in smaller parts, as in a worker. The error of a job that cannot take a step alone is raised."""
        own = OwnActivations(self.model, keeps_text=self.keeps_text, changed=self._changed)
        engine, waiting = Engine(self.model, own=own, controls=self.controls), deque(map(SingleJob, jobs))
        seconds: dict[Job, float] = {}
        start = self._now()
        while waiting or engine.jobs:
            self._join(waiting, engine)
            result = engine.step(isolate_failures=True)
            for error in result.failed.values():
                raise error
            if result.finished:
                seconds |= dict.fromkeys(result.finished, self._now() - start)
            if on_step:
                on_step(sum(job.step for job in jobs), sum(job.num_steps for job in jobs))
        return seconds

    def _join(self, waiting: deque[SingleJob], engine: Engine) -> None:
        """Let jobs join while there is room. Prices make no difference to that, so the default costs will do."""
        if waiting:
            running = [priced(job, DEFAULT_COSTS) for job in engine.jobs]
            for _ in FILL.decide(waiting, len(waiting), running, engine.max_jobs, DEFAULT_COSTS).joining:
                engine.join(waiting.popleft().job)

    def _result(self, prepared: PreparedEdit, denoise_seconds: float) -> Result:
        job, found = prepared.job, prepared.found
        picture, finish_seconds = self._timed(finish, job)
        return Result(
            picture=picture,
            seed=job.edit.seed,
            num_tokens=len(job.masked),
            num_masked_tokens=int(job.masked.sum()),
            num_computed_tokens=job.num_computed_tokens,
            can_reuse=can_reuse(job),
            cache_tier=found.tier if found else None,
            seconds=Timings(prepared.prepare_seconds, prepared.load_seconds, denoise_seconds, finish_seconds),
            reuse=reuse_found(job),
            crop=job.edit.whole.box if job.edit.whole else None,
            lora_step=0 if job.loras else None,
        )

    def _timed(self, work: Callable[[In, Model], Out], given: In) -> tuple[Out, float]:
        start = self._now()
        return work(given, self.model), self._now() - start

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def make_store(device: torch.device) -> Store:
    """Make a store of unlimited size in the memory next to the model."""
    if device.type == "cuda":
        return Store(gpu=GpuTier(device, sys.maxsize))
    return Store(host=HostTier(sys.maxsize))
