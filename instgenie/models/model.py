"""A model: the interface between the engine and the families.

Everything in which families differ is behind these methods, so preparing, stepping, registering and finishing know no
family.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from instgenie.cost.network import NetworkShape
from instgenie.errors import ModelError
from instgenie.jobs.activations import Kind
from instgenie.jobs.blocks import KeptUnits
from instgenie.jobs.job import Branch, Grid, Job
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.jobs.sampler import Schedule
from instgenie.models.controlnet import GuidedFamily, Unguided
from instgenie.models.packed import PackedBatch
from instgenie.models.parts import PipelineParts
from instgenie.types import Convolutions, Edit, Pixels


@dataclass(frozen=True, eq=False)
class Seen:
    """What the network sees as tokens that follow those of the picture that it computes."""

    grids: tuple[Grid, ...] = ()  # of these tokens
    pictures: tuple[Pixels, ...] = ()  # that they show, at any size: some models read prompts together with them


NOTHING = Seen()


class HalfPass(Protocol):
    """A pass at the point where residuals of ControlNets enter it."""

    @property
    def places(self) -> Sequence[Tensor]:
        """The tensors [branches, ...] that residuals are added to."""
        ...

    def end(self) -> Tensor:
        """Make the rest of the pass."""
        ...


class TakeRows(Protocol):
    """Receives what activations keep of a place [branches, 2 or 1, tokens, width]: of the next one, or of that with a
    number."""

    def __call__(self, seen: Tensor, place: int | None = None, /) -> None: ...


class KeptConvolutions(NamedTuple):
    """Which activations have rows for convolutions, and when a pass reads them."""

    tile: int = 0  # side of the tiles at whose borders inputs are kept; 0: none are
    ranks: tuple[int, ...] = ()  # per place of such activations, which in turn a pass reads


@dataclass(frozen=True, eq=False)
class Model(PipelineParts):
    """Pipeline parts with the passes through their network."""

    needs_true_guidance: ClassVar[bool]  # True if only a true guidance above 1 makes use of the negative prompt
    text_flows: ClassVar[bool] = False  # True if text tokens go through the blocks beside those of the image
    sees_picture: ClassVar[bool] = False  # True if the network sees the picture, or a reference, as further tokens
    guided: ClassVar[GuidedFamily] = Unguided()  # what ControlNets of the family see
    max_references: ClassVar[int] = 0  # pictures beside the edited one that an edit may have
    keeps_norm: ClassVar[bool] = False  # guided predictions are as long as those of the prompt, token by token
    reads_pictures: ClassVar[bool] = False  # prompts are read together with the pictures that the network sees
    references_replace: ClassVar[bool] = True  # a reference is seen in the place of the picture; False: after it

    @property
    @abstractmethod
    def size_multiple(self) -> int:
        """Divisor of the sides in pixels of every working size."""

    @property
    @abstractmethod
    def is_fill(self) -> bool:
        """True if the network sees the clean picture around the hole and the mask, as channels beside the latents."""

    @property
    @abstractmethod
    def run_lengths(self) -> tuple[int, ...]:
        """Numbers of blocks in each run of blocks. Tokens dropped in a run stay dropped to its end."""

    @property
    @abstractmethod
    def max_captured(self) -> int:
        """The largest number of readers in a pass, branches or jobs, for which capturing pays: up to it, launching
        kernels takes longer than running them."""

    @property
    def num_flowing_text(self) -> int:
        """Text tokens that flow through the blocks beside the image, padding included; 0 if blocks only attend to the
        text. Only the padding of a text that flows is worth keeping."""
        return self.num_text_tokens if self.text_flows else 0

    def num_kept_text(self, references: Sequence[Grid], keeps_text: bool) -> int:
        """Text tokens whose rows a template keeps: the whole text if it `keeps_text`, for its padding; or those that
        tell of the pictures. References are the grids of the tokens that follow those of the picture."""
        return self.num_flowing_text if keeps_text else 0

    @abstractmethod
    def describe(self) -> NetworkShape:
        """Describe as plain numbers what the blocks compute and what activations keep of them."""

    @abstractmethod
    def kept_units(self, job: Job, side: int) -> list[KeptUnits]:
        """What is kept of a job whose blocks choose what they compute, at every place of a pass. The side is that of
        squares of tokens that are chosen together; 0: the whole picture is one."""

    @abstractmethod
    def schedule(self, edit: Edit, num_tokens: int) -> Schedule: ...

    @abstractmethod
    def guidance_scale(self, edit: Edit) -> float:
        """The scale of classifier-free guidance; an edit has two branches if it is above 1."""

    @property
    @abstractmethod
    def embeds_guidance(self) -> bool:
        """True if the guidance of an edit is an input of the network."""

    @property
    @abstractmethod
    def whole_strength(self) -> float:
        """The strength of an edit of a whole picture that leaves it open: the result shows what the prompt says, and
        keeps the picture's composition and colours."""

    @abstractmethod
    def branches(self, edit: Edit, grid: Grid, seen: Seen = NOTHING) -> tuple[Branch, ...]:
        """The branch of the prompt, and with classifier-free guidance that of the negative prompt."""

    @abstractmethod
    def blank_branch(self, grid: Grid, references: Sequence[Grid] = ()) -> Branch:
        """A branch with zeros for its embeddings, which needs no text encoder."""

    @abstractmethod
    def template_branches(self, grid: Grid, prompt: str, isolated: bool, seen: Seen = NOTHING) -> tuple[Branch, ...]:
        """The branches of a registration: that of the prompt, and that of the empty negative prompt if it differs. An
        isolated registration has one branch without text."""

    @abstractmethod
    def beside(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """The channels that fill models see beside the latents [tokens, channels], from the tokens of a clean picture
        and the pixels of a mask [1, 1, height, width]."""

    def passes(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs that go through the network together, one pass after the other."""
        return [list(jobs)]

    @abstractmethod
    def pack(self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS) -> PackedBatch:
        """Pack one step of the jobs of a pass. With padded lists of tokens many masks look alike, and the numbers stay
        the same."""

    @abstractmethod
    def run(self, packed: PackedBatch) -> Tensor:
        """Make one pass through the network with what `pack` returned."""

    def begin(self, packed: PackedBatch) -> HalfPass:
        """Make the part of a pass that comes before residuals of ControlNets enter it. Only models that need residuals
        in the middle of a pass have two halves."""
        raise NotImplementedError(f"passes of the family {self.family!r} have no halves")

    def predict(self, jobs: Sequence[Job], rows: StepRows = OWN_ROWS) -> list[list[Tensor]]:
        """Per job and branch, a prediction [tokens, channels] for all tokens or for the computed ones. The rows are
        those that the jobs read in this step."""
        predicted: dict[Job, list[Tensor]] = {}
        for together in self.passes(jobs):
            packed = self.pack(together, rows=rows)
            predicted |= zip(together, packed.deal(self.run(packed)), strict=True)
        return [predicted[job] for job in jobs]

    def with_convolutions(self, how: Convolutions) -> Self:
        """The same model whose convolutions see whole pictures, tiles, or masked tiles alone."""
        if how != "dense":
            raise ModelError(f"the network of {self.name!r} has no convolutions that could be {how}: a UNet has")
        return self

    @property
    def kept_convolutions(self) -> KeptConvolutions:
        """What registrations keep for convolutions."""
        return KeptConvolutions()

    @abstractmethod
    def observe(
        self, jobs: Sequence[Job], kind: Kind, keep: TakeRows, num_text: int = 0, with_convolutions: bool = False
    ) -> None:
        """A dense pass; what activations keep of it is handed over in the order of the pass. Rows of the last
        `num_text` tokens of text that flows lie before those of the image; with `with_convolutions`, those for
        convolutions are kept, too."""

    @abstractmethod
    def observe_time(self, jobs: Sequence[Job]) -> Tensor:
        """What modulates the blocks [jobs, width]; no width where nothing does that `y` would need."""


def pack_latents(latents: Tensor, latents_per_token: int = 2) -> Tensor:
    """[1, channels, side * rows, side * columns] -> [rows * columns, channels * side * side]"""
    side = latents_per_token
    _, channels, height, width = latents.shape
    patches = latents.reshape(channels, height // side, side, width // side, side).permute(1, 3, 0, 2, 4)
    return patches.reshape(-1, channels * side * side)


def unpack_latents(tokens: Tensor, grid: tuple[int, int], latents_per_token: int = 2) -> Tensor:
    """[rows * columns, channels * side * side] -> [1, channels, side * rows, side * columns]"""
    side = latents_per_token
    num_rows, num_columns = grid
    patches = tokens.view(num_rows, num_columns, -1, side, side).permute(2, 0, 3, 1, 4)
    return patches.reshape(1, -1, side * num_rows, side * num_columns)


def tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str, length: int) -> Tensor:  # [1, text tokens]
    ids: Tensor = tokenizer(
        prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def count_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, length: int) -> int:
    """Tokens of a prompt that are not padding, at most `length`; the last of them ends the prompt."""
    return len(tokenizer(prompt, max_length=length, truncation=True).input_ids)
