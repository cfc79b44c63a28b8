"""The models of the laws."""

import pytest
from helpers.names import FAMILIES, SHORT

from instgenie.models.model import Model


@pytest.fixture(params=[*FAMILIES, SHORT])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]
