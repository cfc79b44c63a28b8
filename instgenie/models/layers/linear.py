"""Linear layers over packed rows: the one place where a product sees its layer, its rows and who owns them.

Every product over rows of a batch goes through `linear`, so that whatever depends on the owner of a row (an adapter per
job) or on the layer (products of low precision) has a single place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Owners:
    """Which branch of a batch owns each of its packed rows: `index[row] // per_branch`.

    Nothing is computed until `branches` is asked for, so an owner costs no launch where it is not read.
    """

    index: Tensor | None = None  # [rows]; None stands for the numbers of the rows
    per_branch: int = 1

    def branches(self, rows: Tensor) -> Tensor:
        """The number of the owner of each row [rows]."""
        index = torch.arange(rows.shape[:-1].numel(), device=rows.device) if self.index is None else self.index
        return index // self.per_branch


EACH_BRANCH = Owners()  # one row per branch


def linear(layer: nn.Module, rows: Tensor, owners: Owners | None) -> Tensor:
    """Multiply rows [..., channels] by a linear layer or a convolution of one by one. Rows without owners are a
    template's own, which no branch may change."""
    if isinstance(layer, nn.Conv2d):  # with its bias in the same launch
        return F.linear(rows, layer.weight.flatten(1), layer.bias)
    out: Tensor = layer(rows)
    return out
