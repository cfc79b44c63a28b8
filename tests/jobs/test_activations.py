"""Keys as text, and rows of activations."""

from dataclasses import replace

import pytest
import torch
from helpers.spans import KEY, make_spans

from instgenie.jobs.activations import Activations, join, parse_key


def test_a_key_is_read_as_it_was_written() -> None:
    key = replace(KEY, levels=(1.0, 0.1 + 0.2, 1e-17), prompt='"', isolated=True, tenant="shop")
    assert parse_key(key.text) == key
    assert parse_key(key.text).name == key.name != KEY.name


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "no", KEY.text + " ", KEY.text.replace("guidance", "colour")])
def test_other_texts_are_no_keys(text: str) -> None:
    with pytest.raises(ValueError, match=r"key|Expecting|expected|Extra"):
        parse_key(text)


def test_no_tenant_has_the_name_of_another() -> None:
    tenants = [replace(KEY, tenant=tenant) for tenant in ("", "a", "b")]
    assert len({key.name for key in tenants}) == 3


def test_rows_at_a_step_and_a_place() -> None:
    whole = join(6, make_spans(), torch.device("cpu"))
    activations = Activations(KEY, (1,), 24, whole.rows, whole.time, KEY.kept_steps)
    for place, step, branch in ((0, 0, 0), (1, 5, 1)):
        rows = activations.at(step, place, branch, torch.device("cpu"))
        assert torch.equal(rows, whole.rows[place][branch, step])
    assert torch.equal(activations.at(3, 0, 7, torch.device("cpu")), whole.rows[0][1, 3])
