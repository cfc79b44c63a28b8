"""The pictures of templates that the cluster keeps in its own memory. Workers need a picture only to register it; later
edits that name the template instead of sending an image need it too, unless a tier that outlives the cluster has it."""

from collections.abc import Iterable
from dataclasses import replace

from instgenie.cluster.templates import TemplateRecord


def drop_pictures(templates: Iterable[TemplateRecord], max_bytes: int) -> None:
    """Drop the least recently used pictures while all that may be dropped take more than `max_bytes`. The last one used
    stays, however large it is."""
    kept = sorted((template for template in templates if may_drop(template)), key=lambda template: template.used_at)
    num_bytes = sum(picture_bytes(template) for template in kept)
    for template in kept[:-1]:
        if num_bytes <= max_bytes:
            return
        num_bytes -= picture_bytes(template)
        drop_picture(template)


def may_drop(template: TemplateRecord) -> bool:
    """True if it has a picture that no client relies on: nobody asked for it, or a lasting tier has it too. Pictures of
    templates that a client asked for count towards the tenant's quota instead."""
    return template.order.picture is not None and (not template.is_asked_for or template.is_lasting)


def picture_bytes(template: TemplateRecord) -> int:
    return 0 if template.order.picture is None else template.order.picture.nbytes


def drop_picture(template: TemplateRecord) -> None:
    """Registrations in progress keep theirs."""
    template.order = replace(template.order, picture=None)


def drop_failed(templates: dict[str, TemplateRecord], name: str) -> None:
    """Drop the picture of a template that failed. A template that nobody asked for goes altogether."""
    template = templates.get(name)
    if template is None or template.state != "failed" or template.entries or template.parked:
        return
    drop_picture(template)
    if not template.is_asked_for:
        del templates[name]
