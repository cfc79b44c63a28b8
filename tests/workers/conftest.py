import pytest

from instgenie.models.model import Model


@pytest.fixture
def small(models: dict[str, Model]) -> Model:
    return models["blend"]
