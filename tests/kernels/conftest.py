"""Where kernels are tested: on a GPU if there is one, else in Triton's interpreter if it is on (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from instgenie.kernels import switch


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not (switch.HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    if request.param == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter is on")
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
