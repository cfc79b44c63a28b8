"""The OpenAPI document and the server agree: requests that schemathesis generates are answered as documented."""

from typing import Any

import pytest
import schemathesis
from helpers.serving import ALICE, Running
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance  # generated files are not pictures

KEY = {"Authorization": f"Bearer {ALICE}"}


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_document_is_true(server: Running, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=KEY)
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) == 19
    for operation in operations:
        if mode == GenerationMode.POSITIVE or operation.body:
            check(operation, mode)


def check(operation: Any, mode: GenerationMode) -> None:
    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: schemathesis.Case) -> None:
        assume(mode == GenerationMode.POSITIVE or not has_empty_field(case))
        make_quick(case.body, mode)
        case.call_and_validate(headers=KEY, excluded_checks=[positive_data_acceptance], timeout=60)

    holds()


def has_empty_field(case: schemathesis.Case) -> bool:
    """True if a field of a form has an empty text, which is no value: the request may be valid without it."""
    is_form = case.media_type == "multipart/form-data" and isinstance(case.body, dict)
    return is_form and any(isinstance(value, str) and not value.strip() for value in case.body.values())


def make_quick(body: Any, mode: GenerationMode) -> None:
    """Reduce a valid request, which the server really runs, to one small picture and one step. In an invalid one these
    fields stay as they are: the one that is out of its range may be all that is wrong with the request."""
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        for name, quick in (("n", 1), ("num_inference_steps", 1), ("size", "auto")):
            is_replaced = mode == GenerationMode.POSITIVE and type(body.get(name)) is type(quick)
            if name not in body or is_replaced:
                body[name] = quick
