"""Cases of the openai package for Python, any version. Usage: python openai_client.py URL FOLDER"""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
IMAGE, OTHER, MASK = ((FOLDER / name).read_bytes() for name in ("image.png", "other.png", "mask.png"))
QUICK = {"num_inference_steps": 2}


def edit(**fields: Any) -> Any:
    return CLIENT.images.edit(**({"model": "gpt-image-1", "prompt": "a red flower", "extra_body": QUICK} | fields))


def count(answer: Any) -> str:
    assert all(base64.b64decode(one.b64_json).startswith(b"\x89PNG") for one in answer.data)
    notes = (answer.model_extra or {}).get("notes", [])
    return f"{len(answer.data)} pictures, notes: {notes}"


def streamed() -> str:
    events = edit(image=IMAGE, mask=MASK, stream=True, partial_images=1)
    return ", ".join(event.type for event in events)


CASES: dict[str, Callable[[], str]] = {
    "masked": lambda: count(edit(image=IMAGE, mask=MASK)),
    "unmasked": lambda: count(edit(image=IMAGE)),
    "open file, list of one": lambda: count(edit(image=[(FOLDER / "image.png").open("rb")], mask=MASK)),
    "several images": lambda: count(edit(image=[IMAGE, OTHER])),
    "n=2": lambda: count(edit(image=IMAGE, mask=MASK, n=2)),
    "size": lambda: count(edit(image=IMAGE, mask=MASK, size="256x256")),
    "stream": streamed,
    "dall-e-2 with url": lambda: str(edit(model="dall-e-2", image=IMAGE, response_format="url").data[0].url)[:40],
    "generate": lambda: count(CLIENT.images.generate(prompt="a red flower", model="gpt-image-1", extra_body=QUICK)),
    "variation": lambda: count(CLIENT.images.create_variation(image=IMAGE, extra_body=QUICK)),
    "models": lambda: ", ".join(model.id for model in CLIENT.models.list()),
}

for name, case in CASES.items():
    try:
        outcome = case()
    except openai.APIStatusError as refused:
        outcome = f"refused {refused.status_code} {refused.code}: {refused.body['message']}"  # type: ignore[index]
    except Exception as broken:
        outcome = f"BROKEN: {broken!r}"
    print(json.dumps({"client": f"openai {openai.__version__}", "case": name, "outcome": outcome}), flush=True)
