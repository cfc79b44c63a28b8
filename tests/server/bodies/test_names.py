"""Hints for names of other servers come from a table; spelling decides only for names that are in none."""

import pytest

from instgenie.server.bodies.body import RequestForm
from instgenie.server.bodies.fields import EditFields, GenerationFields, TemplateFields, parse_fields
from instgenie.server.bodies.names import NO_COUNTERPART, OTHER_NAMES
from instgenie.server.errors import ApiError

KNOWN = {*EditFields.model_fields, *(picture.name for picture in EditFields.pictures)}


def refusal(name: str, kind: type = EditFields) -> str:
    with pytest.raises(ApiError) as refused:
        parse_fields(kind, RequestForm({"prompt": ["a"], name: ["1"]} if kind != TemplateFields else {name: ["1"]}))
    assert (refused.value.param, refused.value.code) == (name, "unknown_parameter")
    return refused.value.message


@pytest.mark.parametrize(
    ("theirs", "ours"),
    {
        "steps": "num_inference_steps", "cfg_scale": "guidance_scale", "denoising_strength": "strength",
        "mask_blur": "feather", "num_images_per_prompt": "n", "mask_image": "mask", "init_images": "image",
        "sd_steps": "num_inference_steps", "sample_steps": "num_inference_steps", "denoise": "strength",
        "CFG": "guidance_scale", "mask-blur": "feather", "noise_seed": "seed", "image_size": "size",
        "inpaint_full_res": "crop", "padding_mask_crop": "crop_padding", "hd_strategy_crop_margin": "crop_padding",
        "controlnet": "controls", "inpainting_fill": "masked_content",
    }.items(),
)  # fmt: skip
def test_names_of_other_servers(theirs: str, ours: str) -> None:
    assert refusal(theirs) == f"Unknown field {theirs!r}: it is called {ours!r} here."


@pytest.mark.parametrize("name", ["use_extender", "sampler_name", "scheduler", "ip_adapter_image"])
def test_names_without_a_counterpart(name: str) -> None:
    message = refusal(name)
    assert message.startswith(f"Unknown field {name!r}: it has no counterpart here, because ")
    assert "did you mean" not in message


def test_a_request_without_the_field() -> None:
    assert refusal("mask_blur", GenerationFields) == "Unknown field 'mask_blur': this request takes no 'feather'."
    assert refusal("cfg", TemplateFields) == "Unknown field 'cfg': it is called 'guidance_scale' here."


def test_spelling_decides_for_other_names() -> None:
    assert refusal("num_inference_step") == "Unknown field 'num_inference_step': did you mean num_inference_steps?"
    assert refusal("zzz") == "Unknown field 'zzz'."


def test_the_table_holds_no_name_of_ours() -> None:
    others = " ".join([*OTHER_NAMES.values(), *NO_COUNTERPART.values()]).split()
    assert KNOWN.isdisjoint(others)
    assert set(OTHER_NAMES) <= KNOWN
    assert len(others) == len(set(others))
