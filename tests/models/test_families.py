"""The registry of families against the models that are made through it."""

import diffusers
import pytest
from helpers.names import TINY

from instgenie.errors import ModelError
from instgenie.models.families import DUMMIES, FAMILIES, PIPELINES
from instgenie.models.flux.model import as_flux, is_flux
from instgenie.models.model import Model


def test_every_family_has_a_tiny_pipeline_and_a_dummy() -> None:
    assert set(TINY.values()) == set(FAMILIES)
    assert all(family.dummies for family in FAMILIES.values())


def test_names_are_unique() -> None:
    families = FAMILIES.values()
    assert len(PIPELINES) == sum(len(family.pipelines) for family in families)
    assert len(DUMMIES) == sum(len(family.dummies) for family in families)


@pytest.mark.parametrize("name", TINY)
def test_a_model_says_its_family(name: str, models: dict[str, Model]) -> None:
    model = models[name]
    family = FAMILIES[TINY[name]]
    assert model.family == TINY[name]
    assert model.network_name == family.network_name
    assert model.network is model.parts[model.network_name]
    assert set(model.parts) == set(family.pipelines[model.stock_pipeline_name])
    assert hasattr(diffusers, model.stock_pipeline_name)


@pytest.mark.parametrize("name", TINY)
def test_only_flux_passes_as_flux(name: str, models: dict[str, Model]) -> None:
    model = models[name]
    assert is_flux(model) == (TINY[name] == "flux")
    if is_flux(model):
        assert as_flux(model) is model
    else:
        with pytest.raises(ModelError, match=f"of the family {TINY[name]!r}: .*Flux"):
            as_flux(model)
