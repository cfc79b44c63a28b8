"""Roles of the fields of what a pass reads. A captured pass reads columns at fixed addresses and is bound to static
values; it knows nothing else."""

from enum import Enum
from typing import Annotated, TypeVar

T = TypeVar("T")


class Role(Enum):
    COLUMN = "column"
    STATIC = "static"
    LEFT_OUT = "left out"


Column = Annotated[T, Role.COLUMN]  # a tensor or None, or a dataclass, tuple or dict of columns
Static = Annotated[T, Role.STATIC]  # hashable and without tensors: part of the signature
LeftOut = Annotated[T, Role.LEFT_OUT]  # neither captured nor part of the signature
