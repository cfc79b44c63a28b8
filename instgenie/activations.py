"""What a template leaves behind for its edits: the rows of every block at every step. Knows tensors; knows no model."""

import hashlib
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from instgenie.types import Pixels

Kind = Literal["kv", "y"]
NUM_PARTS: dict[Kind, int] = {"kv": 2, "y": 1}  # K and V; or Y


@dataclass(frozen=True)
class Key:
    """Everything the activations of a template depend on. A key that differs in anything is a miss."""

    picture: str  # digest of the decoded picture
    model: str
    size: tuple[int, int]  # (height, width) the model works at
    levels: tuple[float, ...]  # of noise, at all steps
    guidance: float  # 0 where it does not enter the network
    kind: Kind
    dtype: str
    prompt: str = ""  # what the registration saw
    isolated: bool = False  # whether its image tokens saw no text


@dataclass(frozen=True, eq=False)
class Activations:
    """Registered once, read by many edits, written by none.

    `kv`: K and V of all image tokens, after norm and rotary embedding, ready for attention.
    `y`: the image rows that go into a block, which are the Y of the block before; into the first, the embedded image.
    A unit is a run of blocks in which a token that was dropped stays dropped: all of a Flux, one transformer of a UNet.
    Behind the blocks of a unit a UNet keeps what left it, for the convolutions read every token. A Flux keeps no such
    thing: velocities are asked of masked tokens alone.
    """

    key: Key
    units: tuple[int, ...]  # number of blocks in each
    num_tokens: int  # of the picture; deeper levels of a UNet have fewer
    rows: tuple[Tensor, ...]  # in the order of the pass; each [branches, steps, 2 or 1, tokens, width]
    time: Tensor  # [steps, width], what modulated the blocks of a Flux; no width for the others

    @property
    def kind(self) -> Kind:
        return self.key.kind

    @property
    def num_branches(self) -> int:
        return self.rows[0].shape[0]

    @property
    def num_steps(self) -> int:
        return self.rows[0].shape[1]

    @property
    def num_blocks(self) -> int:
        return sum(self.units)

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.time.nbytes


def digest(picture: Pixels) -> str:
    hashed = hashlib.sha256(str(picture.shape).encode())
    hashed.update(picture.tobytes())
    return hashed.hexdigest()
