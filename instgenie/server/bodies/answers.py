"""Finished edits as OpenAI's clients expect them: one JSON answer, or server-sent events. Knows shapes of answers; asks
the cluster for nothing."""

import base64
import json
import time
from collections.abc import Sequence
from typing import Any, Literal

from instgenie.cluster.orders import Facts, Finished
from instgenie.server.bodies.fields import OPENAI, OURS, ImageFields
from instgenie.server.errors import ApiError

Kind = Literal["image_edit", "image_generation"]


def answer(results: Sequence[Finished], fields: ImageFields) -> bytes:
    facts = results[0].facts
    body = about(facts, fields) | {
        "created": int(time.time()),
        "data": [{"b64_json": encoded(one.picture)} | facts_of(one.facts) for one in results],
        "usage": usage([one.facts for one in results], fields.prompt),
    }
    return json.dumps(body).encode()


def about(facts: Facts, fields: ImageFields) -> dict[str, Any]:
    return {
        "size": f"{facts.width}x{facts.height}",
        "quality": OPENAI[OURS[fields.quality]],
        "background": "opaque",
        "output_format": fields.output_format,
    }


def facts_of(facts: Facts) -> dict[str, Any]:
    return {
        "seed": facts.seed,
        "masked_share": round(facts.num_masked_tokens / facts.num_tokens, 4),
        "num_tokens": facts.num_tokens,
        "num_masked_tokens": facts.num_masked_tokens,
        "num_computed_tokens": facts.num_computed_tokens,
        "cache_tier": facts.cache_tier,
        "worker": facts.worker,
        "num_attempts": facts.num_attempts,
        "seconds": {
            "queue": round(facts.queue_seconds, 4),
            "prepare": round(facts.prepare_seconds, 4),
            "denoise": round(facts.denoise_seconds, 4),
            "finish": round(facts.finish_seconds, 4),
        },
        "predicted_dense_seconds": round(facts.dense_seconds, 4),
    }


def usage(facts: Sequence[Facts], prompt: str) -> dict[str, Any]:
    """In: the picture's tokens and the prompt's words. Out: the masked tokens of all pictures."""
    num_image, num_text = facts[0].num_tokens, len(prompt.split())
    num_out = sum(one.num_masked_tokens for one in facts)
    return {
        "input_tokens": num_image + num_text,
        "input_tokens_details": {"image_tokens": num_image, "text_tokens": num_text},
        "output_tokens": num_out,
        "output_tokens_details": {"image_tokens": num_out, "text_tokens": 0},
        "total_tokens": num_image + num_text + num_out,
    }


def partial_event(kind: Kind, index: int, partial_index: int, picture: bytes, size: str, fields: ImageFields) -> bytes:
    return event(
        f"{kind}.partial_image",
        {
            "b64_json": encoded(picture),
            "partial_image_index": partial_index,
            "created_at": int(time.time()),
            "size": size,
            "quality": OPENAI[OURS[fields.quality]],
            "background": "opaque",
            "output_format": fields.output_format,
            "index": index,
        },
    )


def completed_event(kind: Kind, index: int, finished: Finished, fields: ImageFields) -> bytes:
    body = {"b64_json": encoded(finished.picture), "created_at": int(time.time()), "index": index}
    body |= about(finished.facts, fields) | facts_of(finished.facts)
    return event(f"{kind}.completed", body | {"usage": usage([finished.facts], fields.prompt)})


def event(kind: str, body: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | body)}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    return f"data: {json.dumps(error.body)}\n\n".encode()


def encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode("ascii")
