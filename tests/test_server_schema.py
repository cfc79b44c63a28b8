"""The OpenAPI document and the server agree: what schemathesis makes from one is answered by the other as promised."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS
from schemathesis.specs.openapi.checks import positive_data_acceptance  # generated files are not pictures
from serving import ALICE, Running


@pytest.fixture
def document(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {ALICE}"})


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_document_is_true(case: schemathesis.Case, server: Running) -> None:
    make_quick(case.body)
    case.call_and_validate(
        headers={"Authorization": f"Bearer {ALICE}"}, excluded_checks=[positive_data_acceptance], timeout=60
    )


def make_quick(body: Any) -> None:
    """What is valid is really made: one small picture of one step."""
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        for name, quick in (("n", 1), ("num_inference_steps", 1), ("size", "auto")):
            if name in body and isinstance(body[name], type(quick)):
                body[name] = quick
        body.setdefault("num_inference_steps", 1)


def test_all_checks_are_known() -> None:
    assert positive_data_acceptance in CHECKS.get_all()
