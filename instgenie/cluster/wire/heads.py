"""Parts that several messages share: descriptions of tensors, jobs, templates and models."""

from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

Frame: TypeAlias = bytes | memoryview


class Message(Struct, frozen=True, tag=True):
    """Base of every message; its class name travels with it."""


class TensorHead(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]


class JobHead(Struct, frozen=True):
    """A job without its tensors, which follow as frames."""

    edit: dict[str, Any]  # the fields of the edit, without its pixels
    grid: tuple[int, int]
    scale: float
    schedule_kind: str
    schedule: msgspec.Raw
    num_prompts: tuple[int | None, ...]  # per branch, its leading text tokens that are not padding
    tensors: tuple[TensorHead, ...]
    keeps_norm: bool = False
    num_facts: int = 0  # the last text tokens of each branch that tell of the pictures alone
    has_words: bool = False  # per branch, its text as ControlNets read it comes last


class TemplateHead(Struct, frozen=True):
    """Everything needed to find a template's activations."""

    id: str
    picture: str  # digest of the decoded picture
    tenant: str
    model: str  # digest of the weights
    size: tuple[int, int]  # (height, width) the model works at
    steps: int
    guidance: float


class ModelFacts(Struct, frozen=True):
    """Properties of the model that the cluster and its clients need to know."""

    name: str
    family: str
    is_fill: bool
    own_size: int
    steps: int
    guidance: float
    embeds_guidance: bool  # True if an edit's guidance is an input of the network
    whole_strength: float  # of an edit of a whole picture that leaves it open
    needs_true_guidance: bool  # True if a negative prompt needs a true guidance above 1, whatever the guidance is
    patch: int  # side of a token in pixels
    size_multiple: int  # working sizes are multiples of this
    num_blocks: int
    device: str
    dtype: str
    sees_picture: bool = False  # True if the network sees the picture, or a reference, as further tokens
    max_references: int = 0  # pictures beside the edited one that an edit may have
    max_side: int | None = None  # in pixels, of a working size; None: no limit of the model's own
    removes: bool = False  # True if it is trained to remove things, and does so from noise
