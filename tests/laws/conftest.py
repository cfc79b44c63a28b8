"""The models of the laws."""

from collections.abc import Iterator

import pytest
import torch
from helpers.names import FAMILIES, SHORT, UNET_FAMILIES

from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel


@pytest.fixture(params=[*FAMILIES, SHORT])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


@pytest.fixture(params=UNET_FAMILIES)
def unet(request: pytest.FixtureRequest, models: dict[str, Model]) -> UnetModel:
    model = models[request.param]
    assert isinstance(model, UnetModel)
    return model


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """Convolutions of many small pictures may be Winograd's on a CPU, which round ten times as much."""
    with torch.backends.nnpack.flags(enabled=False):
        yield
