"""Models and templates as clients see them."""

import base64

import numpy as np
import openai
import pytest
from helpers.serving import BOB, MASK, Running, mask, picture, png, register

from instgenie.pictures.picture import open_picture


def test_models(server: Running) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-image-1")
    assert refused.value.code == "model_not_found"


def test_a_template_is_registered_used_and_deleted(server: Running) -> None:
    name = register(server, png(picture(seed=9)), num_inference_steps="2")
    with server.http() as client:
        status = client.get(f"/v1/templates/{name}").json()
        assert (status["num_registered_steps"], status["num_steps"], status["size"]) == (2, 2, "56x40")
        assert sum(status["tier_bytes"].values()) > 0
        assert name in [one["id"] for one in client.get("/v1/templates").json()["data"]]
        fields = {"prompt": "a red cat", "num_inference_steps": "2", "template": name}
        answer = client.post("/v1/images/edits", files={"mask": MASK}, data=fields)
        assert answer.status_code == 200, answer.text
        one = answer.json()["data"][0]
        assert one["cache_tier"] in ("gpu", "host")
        result = open_picture(base64.b64decode(one["b64_json"]))
        assert np.array_equal(result[~mask()], picture(seed=9)[~mask()])
        with server.http(BOB) as other:
            seen = [other.get(f"/v1/templates/{name}"), other.delete(f"/v1/templates/{name}")]
            seen += [other.post("/v1/images/edits", files={"mask": MASK}, data=fields)]
            assert [(one.status_code, one.json()["error"]["code"]) for one in seen] == [(404, "template_not_found")] * 3
            assert other.get("/v1/templates").json()["data"] == []
        assert client.delete(f"/v1/templates/{name}").json() == {"id": name, "object": "template", "deleted": True}
        assert client.delete(f"/v1/templates/{name}").status_code == 404
        assert client.post("/v1/images/edits", files={"mask": MASK}, data=fields).status_code == 404
