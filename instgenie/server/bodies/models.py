"""Answers that list models, LoRAs and ControlNets."""

from typing import Literal

from instgenie.adapters.controlnets import ControlShape, RegisteredControlNet
from instgenie.adapters.registry import RegisteredLora
from instgenie.cluster.wire import ModelFacts
from instgenie.pictures.picture import MAX_SIZE
from instgenie.server.bodies.answers import AnswerBody


class ModelAbilities(AnswerBody):
    mask: bool  # edits the masked part of a picture and leaves the rest as it is
    max_references: int  # pictures beside the edited one that a request may have
    negative_prompt: bool
    native_size: str  # WIDTHxHEIGHT that the model works best at
    size_multiple: int  # sides in pixels that the model works at are multiples of this
    max_side: int  # in pixels, that the model works at
    steps: int  # of requests that ask for no number of steps
    guidance_scale: float  # of requests that ask for none


class ModelAnswer(AnswerBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    family: str | None = None  # None until the model is loaded
    abilities: ModelAbilities | None = None
    root: str | None = None  # of a LoRA or a ControlNet: its file or folder
    parent: str | None = None  # of a LoRA or a ControlNet: the model that it is for


class LoraAnswer(AnswerBody):
    id: str
    object: Literal["lora"]
    created: int
    root: str
    parent: str
    num_bytes: int
    shared: bool  # with all API keys


class LorasAnswer(AnswerBody):
    object: Literal["list"]
    data: list[LoraAnswer]


class ControlNetAnswer(AnswerBody):
    id: str
    object: Literal["controlnet"]
    created: int
    root: str
    parent: str
    num_bytes: int
    num_modes: int | None  # kinds of images that it knows, of which an edit names one; None: one
    fits: bool  # True if the model can be guided by it; as long as the model loads, all seem to fit


class ControlNetsAnswer(AnswerBody):
    object: Literal["list"]
    data: list[ControlNetAnswer]


class LoraRemoved(AnswerBody):
    id: str
    object: Literal["lora"]
    deleted: bool


class ModelsAnswer(AnswerBody):
    object: Literal["list"]
    data: list[ModelAnswer]


def describe_model(name: str, facts: ModelFacts | None) -> ModelAnswer:
    """Tell what a model can; before it is loaded, only its name."""
    answer = ModelAnswer(id=name, object="model", created=0, owned_by="instgenie")
    if facts is None:
        return answer
    abilities = ModelAbilities(
        mask=True,
        max_references=facts.max_references,
        negative_prompt=True,
        native_size=f"{facts.own_size}x{facts.own_size}",
        size_multiple=facts.size_multiple,
        max_side=min(facts.max_side or MAX_SIZE, MAX_SIZE),
        steps=facts.steps,
        guidance_scale=facts.guidance,
    )
    return answer.model_copy(update={"family": facts.family, "abilities": abilities})


def describe_as_model(adapter: RegisteredLora | RegisteredControlNet, model: str) -> ModelAnswer:
    """A LoRA or a ControlNet among the models, as vLLM lists them."""
    name, created, root = adapter.name, adapter.created, adapter.path.name
    return ModelAnswer(id=name, object="model", created=created, owned_by="instgenie", root=root, parent=model)


def describe_controlnet(net: RegisteredControlNet, model: str, shape: ControlShape | None) -> ControlNetAnswer:
    return ControlNetAnswer(
        id=net.name,
        object="controlnet",
        created=net.created,
        root=net.path.name,
        parent=model,
        num_bytes=net.num_bytes,
        num_modes=net.num_modes,
        fits=shape is None or net.fits(shape),
    )


def describe_lora(lora: RegisteredLora, model: str) -> LoraAnswer:
    return LoraAnswer(
        id=lora.name,
        object="lora",
        created=lora.created,
        root=lora.root,
        parent=model,
        num_bytes=lora.num_bytes,
        shared=not lora.tenant,
    )
