"""Cases of LiteLLM. Usage: python litellm_client.py URL FOLDER"""

import base64
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import litellm

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
QUICK = {"num_inference_steps": 2}


def edit(**fields: Any) -> Any:
    return litellm.image_edit(
        model="openai/gpt-image-1",
        prompt="a red flower",
        api_base=f"{URL}/v1",
        api_key="none",
        extra_body=QUICK,
        **fields,
    )


def file(name: str) -> Any:
    return (FOLDER / name).open("rb")


def generate() -> Any:
    return litellm.image_generation(
        model="openai/gpt-image-1", prompt="a red flower", api_base=f"{URL}/v1", api_key="none", extra_body=QUICK
    )


def count(answer: Any) -> str:
    assert all(base64.b64decode(one.b64_json).startswith(b"\x89PNG") for one in answer.data)
    return f"{len(answer.data)} pictures"


CASES: dict[str, Callable[[], str]] = {
    "masked": lambda: count(edit(image=file("image.png"), mask=file("mask.png"))),
    "unmasked": lambda: count(edit(image=file("image.png"))),
    "several images": lambda: count(edit(image=[file("image.png"), file("other.png")])),
    "n=2": lambda: count(edit(image=file("image.png"), mask=file("mask.png"), n=2)),
    "generate": lambda: count(generate()),
}

for name, case in CASES.items():
    try:
        outcome = case()
    except Exception as failed:
        status = getattr(failed, "status_code", None)
        outcome = f"refused {status}: {str(failed)[:200]}" if status in (400, 404) else f"BROKEN: {failed!r}"
    print(json.dumps({"client": f"litellm {version('litellm')}", "case": name, "outcome": outcome}), flush=True)
