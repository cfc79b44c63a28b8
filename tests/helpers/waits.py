"""Operations that wait for a GPU where tensors lie on one, found on any device."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING = {
    aten.nonzero.default,  # the size of the result depends on the values
    aten.masked_select.default,
    aten._local_scalar_dense.default,  # item(), bool(), int() of a tensor
    aten.equal.default,
    aten.lift_fresh.default,  # torch.tensor(): numbers come from memory that is not pinned
}
ASYNCHRONOUS = {"to_device", "place_bounds"}  # functions that pin such numbers and copy them without a wait


class Waits(TorchDispatchMode):
    """Lists the operations within the context that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in WAITING or (func is aten.index.Tensor and any(is_mask(index) for index in args[1])):
            function, line = where()
            if function not in ASYNCHRONOUS:
                self.found.append(f"{func} at {line}")
        return func(*args, **(kwargs or {}))


def where() -> tuple[str, str]:
    """The innermost function of the package that is running, and its line."""
    ours = [frame for frame in traceback.extract_stack() if "/instgenie/" in frame.filename]
    return (ours[-1].name, f"{ours[-1].filename}:{ours[-1].lineno}") if ours else ("", "a test")


def is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
