"""Limits on the templates that one tenant asks for. Templates that nobody asked for do not count."""

from collections.abc import Iterable

from instgenie.cluster.templates import TemplateRecord
from instgenie.errors import TemplatesFullError

MAX_BYTES = 2**31  # for the pixels of one tenant's templates
MAX_WAITING = 32  # templates of one tenant that wait to be registered


def check_quota(templates: Iterable[TemplateRecord], tenant: str, max_templates: int) -> None:
    """Raise unless the tenant may ask for one more template."""
    asked = [template for template in templates if template.is_asked_for and template.order.tenant == tenant]
    num_bytes = sum(3 * height * width for height, width in (template.order.size for template in asked))
    num_waiting = sum(template.state in ("queued", "registering") for template in asked)
    if len(asked) >= max_templates:
        raise TemplatesFullError(f"you have {len(asked):,} templates of {max_templates:,}: delete one")
    if num_bytes > MAX_BYTES:
        raise TemplatesFullError(
            f"the pictures of your templates take {num_bytes:,} bytes of {MAX_BYTES:,}: delete one"
        )
    if num_waiting >= MAX_WAITING:
        message = f"{num_waiting} of your templates wait to be registered: at most {MAX_WAITING} may"
        raise TemplatesFullError(message, passes=True)
