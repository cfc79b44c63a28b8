"""The requests that chat front ends send, field by field: Open WebUI and LibreChat, both also by way of Azure."""

from pathlib import Path
from typing import Any

import httpx

PROMPT = "make the flower red"


def run_front_ends(url: str, folder: Path) -> list[dict[str, str]]:
    image, other = ((folder / name).read_bytes() for name in ("image.png", "other.png"))
    one = [("image", ("image.png", image, "image/png"))]
    one_of_list = [("image[]", ("image.png", image, "image/png"))]
    two = [*one_of_list, ("image[]", ("image.png", other, "image/png"))]
    web_ui = {"model": "gpt-image-1", "prompt": PROMPT, "n": "1", "size": "256x256", "response_format": "b64_json"}
    chat = {"model": "gpt-image-1", "prompt": PROMPT, "quality": "auto", "size": "auto"}
    edits = "/v1/images/edits"
    azure = f"{edits}?api-version=2025-04-01-preview"
    bearer, key = {"authorization": "Bearer none"}, {"api-key": "none"}
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        cases: dict[tuple[str, str], httpx.Response] = {
            ("Open WebUI", "edit"): client.post(edits, files=one, data=web_ui, headers=bearer),
            ("Open WebUI", "edit, model left empty"): client.post(
                edits, files=one, data=web_ui | {"model": "", "background": "transparent"}, headers=bearer
            ),
            ("Open WebUI", "several images"): client.post(edits, files=two, data=web_ui, headers=bearer),
            ("Open WebUI", "edit by Azure"): client.post(azure, files=one, data=web_ui, headers=bearer),
            ("Open WebUI", "generate"): client.post(
                "/v1/images/generations", json=web_ui | {"n": 1, "size": "512x512"}, headers=bearer
            ),
            ("LibreChat", "edit"): client.post(edits, files=one_of_list, data=chat, headers=bearer),
            ("LibreChat", "several images"): client.post(edits, files=two, data=chat, headers=bearer),
            ("LibreChat", "edit by Azure"): client.post(azure, files=one_of_list, data=chat, headers=key),
            ("LibreChat", "generate"): client.post(
                "/v1/images/generations",
                json={"model": "gpt-image-1", "prompt": PROMPT, "n": 1, "background": "auto", "output_format": "webp",
                      "output_compression": 100, "quality": "auto", "size": "auto"},
                headers=bearer,
            ),
        }  # fmt: skip
    return [
        {"client": client_name, "case": case, "outcome": outcome(answer)}
        for (client_name, case), answer in cases.items()
    ]


def outcome(answer: httpx.Response) -> str:
    body: dict[str, Any] = answer.json()
    if answer.status_code == 200:
        return f"{len(body['data'])} pictures, {body['size']}, notes: {body.get('notes', [])}"
    if answer.status_code < 500:
        return f"refused {answer.status_code} {body['error']['code']}: {body['error']['message']}"
    return f"BROKEN: {answer.status_code} {body}"
