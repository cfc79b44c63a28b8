"""Rows that flow from block to block, with the output of the last block still to be added."""

from torch import Tensor

from instgenie.kernels.modulate import add_gated, add_norm_modulate, norm_modulate
from instgenie.kernels.quantize import Rows


class Residual:
    """Rows [tokens, width] and the gated output of the last block. The norm that begins the next block adds it in its
    own launch; what needs the sum earlier asks for `total`."""

    def __init__(
        self, rows: Tensor, gate: Tensor | None = None, output: Tensor | None = None, index: Tensor | None = None
    ) -> None:
        """The gate is [branches, width], the output [tokens, width]; index [tokens] gives the branch of each token."""
        self._rows = rows
        self._missing = None if gate is None or output is None else (gate, output)
        self._index = index

    @property
    def total(self) -> Tensor:
        if self._missing:
            self._rows = add_gated(self._rows, *self._missing, self._index)
            self._missing = None
        return self._rows

    def normed(self, shift: Tensor, scale: Tensor, index: Tensor | None, eps: float, fp8: bool = False) -> Rows:
        """(1 + scale) * norm(total) + shift; afterwards the total costs nothing."""
        if self._missing is None:
            return norm_modulate(self._rows, shift, scale, index, eps, fp8)
        gate, output = self._missing
        self._rows, normed = add_norm_modulate(self._rows, gate, output, shift, scale, index, eps, fp8)
        self._missing = None
        return normed
