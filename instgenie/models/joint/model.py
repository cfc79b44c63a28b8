"""A model whose text flows through the blocks beside the image: what families of such models share."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from instgenie.cost.network import NetworkShape
from instgenie.jobs.activations import Kind
from instgenie.jobs.blocks import KeptUnits
from instgenie.jobs.job import Branch, Grid, Job, chooses, reads_others
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.jobs.sampler import FlowSchedule, flow_schedule, flow_strength
from instgenie.models.joint.batch import JointBatch, pack
from instgenie.models.joint.modulation import ModulationTables
from instgenie.models.joint.network import JointNetwork, observe, velocity
from instgenie.models.model import NOTHING, Model, Seen, TakeRows
from instgenie.models.packed import PackedBatch
from instgenie.types import Edit

CAPTURED_AREA = 2 * 3072**2  # branches times squared width; below it, launching kernels takes longer than running them
WHOLE_SIGMA = 0.9  # noise level at which a whole picture starts: less leaves it as it is, more leaves little of it


@dataclass(frozen=True, eq=False)
class JointModel(Model):
    """A flow model over a transformer. A template has one branch: its negative prompt is its prompt, empty."""

    network_name = "transformer"
    is_convolutional = False
    latents_per_token = 2
    text_flows = True

    transformer: Any

    @cached_property
    @abstractmethod
    def joint_network(self) -> JointNetwork:
        """The transformer as passes over packed tokens see it."""

    @property
    def size_multiple(self) -> int:
        return self.patch

    @property
    def width(self) -> int:
        """Channels of a row."""
        return int(self.transformer.inner_dim)

    @property
    def is_fill(self) -> bool:
        return False

    @property
    def run_lengths(self) -> tuple[int, ...]:
        return (len(self.joint_network.blocks),)

    @property
    def max_captured(self) -> int:
        return max(CAPTURED_AREA // self.width**2, 1)

    def describe(self) -> NetworkShape:
        return self.joint_network.describe()

    def kept_units(self, job: Job, side: int) -> list[KeptUnits]:
        num_image = len(job.inside) if reads_others(job) else job.num_seen
        reads_padding = job.activations is not None and job.activations.num_text > 0
        nums = len(job.branches) * num_image, sum(job.tokens.num_computed_text(reads_padding))
        return [KeptUnits(num, self.width, self.width) for num in nums] * len(self.joint_network.blocks)

    def schedule(self, edit: Edit, num_tokens: int) -> FlowSchedule:
        return flow_schedule(self.scheduler, edit.steps, num_tokens, edit.strength)

    @property
    def whole_strength(self) -> float:
        return flow_strength(self.scheduler, (self.own_size // self.patch) ** 2, WHOLE_SIGMA)

    def branches(self, edit: Edit, grid: Grid, seen: Seen = NOTHING) -> tuple[Branch, ...]:
        prompts = (edit.prompt, edit.negative_prompt) if self.guidance_scale(edit) > 1 else (edit.prompt,)
        return tuple(self.branch(prompt, grid, seen) for prompt in prompts)

    @abstractmethod
    def branch(self, prompt: str, grid: Grid, seen: Seen = NOTHING) -> Branch: ...

    def template_branches(self, grid: Grid, prompt: str, isolated: bool, seen: Seen = NOTHING) -> tuple[Branch, ...]:
        branch = self.branch(prompt, grid, seen)
        num_text = len(branch.text)
        without_text = replace(branch, text=branch.text[:0], rotary=branch.rotary[num_text:], num_prompt=0, num_facts=0)
        return (without_text,) if isolated else (branch,)

    @property
    def num_pooled(self) -> int:
        """Channels of a pooled prompt; 0 for models that read none."""
        return int(self.transformer.config.pooled_projection_dim)

    def blank_branch(self, grid: Grid, references: Sequence[Grid] = ()) -> Branch:
        text = torch.zeros(self.num_text_tokens, self.width, device=self.device, dtype=self.dtype)
        pooled = text.new_zeros(self.num_pooled)
        return Branch(text, pooled, self.rotary(len(text), grid, references))

    @abstractmethod
    def rotary(self, num_text: int, grid: Grid, references: Sequence[Grid] = ()) -> Tensor:
        """The rotary table of one branch [text tokens + image tokens seen, head channels / 2]; without channels for
        models that rotate nothing."""

    def beside(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        return tokens[:, :0]

    @cached_property
    def modulation(self) -> ModulationTables:
        return ModulationTables(self.joint_network)

    def passes(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """All jobs together, but those whose blocks choose their tokens."""
        choosing, others = [job for job in jobs if chooses(job)], [job for job in jobs if not chooses(job)]
        return [group for group in (others, choosing) if group]

    def pack(self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS) -> JointBatch:
        return self.pack_step(jobs, pads, rows, self.modulation.at(jobs))

    def pack_step(
        self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS, modulation: Tensor | None = None
    ) -> JointBatch:
        """Without the columns of modulation, blocks compute their own."""
        return pack(jobs, pads, rows, modulation, clean_references=self.joint_network.clean_references)

    def run(self, packed: PackedBatch) -> Tensor:
        assert isinstance(packed, JointBatch)
        return velocity(self.joint_network, packed)

    def observe(
        self, jobs: Sequence[Job], kind: Kind, keep: TakeRows, num_text: int = 0, with_convolutions: bool = False
    ) -> None:
        assert not with_convolutions  # it has none
        num_branches = sum(len(job.branches) for job in jobs)
        for seen in observe(self.joint_network, self.pack_step(jobs), kind, num_text):
            keep(seen.unflatten(1, (num_branches, -1)).transpose(0, 1))

    def observe_time(self, jobs: Sequence[Job]) -> Tensor:
        return self.joint_network.embed_time(self.pack_step(jobs))
