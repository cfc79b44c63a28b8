"""Tiny Qwen-Image-Edit models of several pictures, with the weights of that of one picture or with their own."""

from dataclasses import fields

from diffusers import DiffusionPipeline, QwenImageEditPlusPipeline, QwenImageTransformer2DModel

from helpers.families import PublishedEditPipeline, qwen_parts
from instgenie.models.qwen.model import QwenEditModel, QwenEditPlusModel


class PublishedPlusPipeline(PublishedEditPipeline):
    published = QwenImageEditPlusPipeline


def qwen_plus() -> DiffusionPipeline:
    """Like 2511: references are modulated as at time 0."""
    return PublishedPlusPipeline(**qwen_parts(zero_cond_t=True), processor=None)


def several_pictures(model: QwenEditModel, clean: bool = False) -> QwenEditPlusModel:
    """The same model as one of several pictures; with `clean`, references are modulated as at time 0."""
    parts = {field.name: getattr(model, field.name) for field in fields(model)}
    return QwenEditPlusModel(**parts | ({"transformer": with_clean_references(model.transformer)} if clean else {}))


def with_clean_references(transformer: QwenImageTransformer2DModel) -> QwenImageTransformer2DModel:
    """A network with the same weights that modulates references as at time 0, as diffusers makes it."""
    twin = QwenImageTransformer2DModel.from_config({**transformer.config, "zero_cond_t": True})
    twin.load_state_dict(transformer.state_dict(), assign=True)
    return twin.eval()
