"""API keys: the headers that carry them, and the tenants they belong to."""

import pytest
from starlette.datastructures import Headers

from instgenie.server.errors import ApiError
from instgenie.server.guard.keys import ApiKey, ApiKeys, parse_key_file


def tenant(keys: ApiKeys, **headers: str) -> str:
    return keys.tenant(Headers({name.replace("_", "-"): value for name, value in headers.items()}))


def test_the_headers_of_openai_and_azure() -> None:
    keys = ApiKeys([ApiKey("one"), ApiKey("two")])
    assert tenant(keys, authorization="Bearer one") == tenant(keys, api_key="one") == tenant(keys, api_key=" one ")
    assert tenant(keys, api_key="one") != tenant(keys, api_key="two")
    assert tenant(keys, authorization="Basic abc", api_key="two") == tenant(keys, api_key="two")
    assert tenant(keys, authorization="Bearer none", api_key="two") == tenant(keys, api_key="two")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "is missing"),
        ({"api_key": "three"}, "is unknown"),
        ({"api_key": ""}, "is unknown"),
        ({"api_key": "Bearer one"}, "is unknown"),
        ({"authorization": "one"}, "is unknown"),
        ({"authorization": "Basic one"}, "is unknown"),
    ],
)
def test_headers_without_a_known_key(headers: dict[str, str], expected: str) -> None:
    with pytest.raises(ApiError) as refused:
        tenant(ApiKeys([ApiKey("one")]), **headers)
    assert refused.value.status == 401
    assert f"The API key {expected}" in refused.value.message
    assert "'api-key: KEY'" in refused.value.message


def test_a_key_that_is_replaced_leaves_its_templates_to_the_next() -> None:
    """The tenant, under which templates are kept, is the name; without a name it is the key's digest."""
    before, during, after = (
        ApiKeys(parse_key_file(text))
        for text in ("alice:old\nother", "alice:old\nalice:new\nother", "alice:new\nother")
    )
    owner = tenant(before, api_key="old")
    assert tenant(during, api_key="old") == tenant(during, api_key="new") == tenant(after, api_key="new") == owner
    with pytest.raises(ApiError):
        tenant(after, api_key="old")
    assert len({tenant(keys, api_key="other") for keys in (before, during, after)} | {owner}) == 2


def test_a_key_without_a_name_is_the_tenant_it_was() -> None:
    """Templates on disk carry this digest."""
    assert tenant(ApiKeys([ApiKey("alice-key")]), api_key="alice-key") == "72ee9d4355ccb9d3a4c9dbf37382e38e"
