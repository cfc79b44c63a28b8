"""Templates: pictures registered ahead, so that their first edit already finds cached activations. Knows ids and
tenants; another tenant's template is answered like one that does not exist."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from instgenie.cluster.orders import TemplateStatus
from instgenie.errors import ClosedError, InstGenieError, PictureError, TemplatesFullError
from instgenie.pictures.header import decoding_bytes, kept_bytes
from instgenie.pictures.photo import Photo
from instgenie.server.admission import Admitted
from instgenie.server.bodies.answers import TemplateAnswer, TemplateLeaving, TemplateRemoved, TemplatesAnswer
from instgenie.server.bodies.forms import read_template
from instgenie.server.bodies.pictures import decode_template
from instgenie.server.bodies.schema import ONE_TEMPLATE, REMOVED_TEMPLATE, TEMPLATE, TEMPLATES
from instgenie.server.errors import NO_RETRY, ApiError, JsonResponse, closed, from_user_error, not_found, retry_after
from instgenie.server.service import SECONDS_TO_LOAD, HttpService, service_of, tenant_of
from instgenie.server.watch import unless_gone
from instgenie.types import Notes

SECONDS_TO_REGISTER = 10

SECONDS_TO_DELETE = 5.0  # that a client waits for the answer

router = APIRouter(prefix="/v1/templates")


@router.post("", summary="Register a template", status_code=201, **TEMPLATE)
async def register_template(request: Request) -> Response:
    service = service_of(request)
    service.check_open()
    tenant = tenant_of(request)
    check_room(service, tenant)
    async with service.intake.form(request) as form:
        fields, image = await service.decoder.run(read_template, form)
        service.check_work(fields.num_inference_steps)
        try:
            photo = await unless_gone(request, open_template(service, image, service.admit(request, 0)))
            steps, guidance = fields.num_inference_steps, fields.guidance_scale
            status = await service.cluster.register(tenant, photo.pixels, steps, guidance)
        except ClosedError:
            raise closed("No worker can register the template.", SECONDS_TO_LOAD, "unavailable") from None
        except TemplatesFullError as full:
            raise templates_full(full) from None
        except InstGenieError as error:
            raise from_user_error(error) from None
    return JsonResponse(describe(status, [*form.notes, *template_notes(photo)]).model_dump(), 201)


@router.get("", summary="List your templates", **TEMPLATES)
async def list_templates(request: Request) -> Response:
    found = service_of(request).cluster.templates(tenant_of(request))
    answer = TemplatesAnswer(object="list", data=[describe(status) for status in found])
    return JsonResponse(answer.model_dump())


@router.get("/{template}", summary="Describe one template and its progress", **ONE_TEMPLATE)
async def get_template(request: Request, template: str) -> Response:
    status = service_of(request).cluster.template(tenant_of(request), template)
    if status is None:
        raise unknown(template)
    return JsonResponse(describe(status).model_dump())


@router.delete("/{template}", summary="Delete a template", **REMOVED_TEMPLATE)
async def delete_template(request: Request, template: str) -> Response:
    service, tenant = service_of(request), tenant_of(request)
    if not await service.cluster.forget(tenant, template):
        raise unknown(template)
    if await service.cluster.forgetting.until_done(template, SECONDS_TO_DELETE):
        return JsonResponse(TemplateRemoved(id=template, object="template", deleted=True).model_dump())
    left = service.cluster.forgetting.left(template)
    reason = f"the {' and '.join(left)} cache cannot be reached" if left else "a worker is still at it"
    message = f"The template is not used any more, but not yet deleted everywhere: {reason}. The server goes on trying."
    leaving = TemplateLeaving(id=template, object="template", deleted=False, message=message)
    return JsonResponse(leaving.model_dump(), 202)


def template_notes(photo: Photo) -> Notes:
    if photo.source is None or photo.source.pixels is None:
        return photo.notes
    return [
        *photo.notes,
        "Edits that name the template answer in sRGB without alpha; edits that send the file keep both.",
    ]


async def open_template(service: HttpService, image: bytes, admitted: Admitted) -> Photo:
    header = await service.decoder.header(image, PictureError)
    admitted.keep(kept_bytes(header, None))
    return await admitted.decode(decoding_bytes(header), decode_template, image, service.decoder.max_pixels)


def check_room(service: HttpService, tenant: str) -> None:
    if not service.cluster.config.reuse:
        raise ApiError(400, "This server runs with --no-reuse and registers no templates.", "no_reuse")
    try:
        service.cluster.check_quota(tenant)
    except TemplatesFullError as full:
        raise templates_full(full) from None


def templates_full(full: TemplatesFullError) -> ApiError:
    message = str(full)
    headers = retry_after(SECONDS_TO_REGISTER) if full.passes else NO_RETRY
    return ApiError(429, message[:1].upper() + message[1:] + ".", "templates_full", headers=headers)


def unknown(template: str) -> ApiError:
    return not_found("template", template, "template_not_found", "template")


def describe(status: TemplateStatus, notes: Notes | None = None) -> TemplateAnswer:
    return TemplateAnswer(
        id=status.id,
        object="template",
        state=status.state,
        num_steps=status.num_steps,
        num_registered_steps=status.num_registered_steps,
        size=f"{status.width}x{status.height}",
        tier_bytes={str(tier): num_bytes for tier, num_bytes in status.tier_bytes.items()},
        message=status.message,
        notes=notes or [],
    )
