"""OpenAI's images API: edits, generations, models. Knows the path of a request; `bodies` knows the shapes."""

from dataclasses import replace
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from instgenie.cluster.cluster import has_asked_for
from instgenie.cluster.orders import Order
from instgenie.errors import ClosedError, InstGenieError, MaskError, PictureError
from instgenie.pictures.cropping import Canvas, choose_box, describe_crop
from instgenie.pictures.header import Header, crop_bytes, decoding_bytes, kept_bytes
from instgenie.pictures.photo import Photo
from instgenie.pictures.picture import MAX_SIDE
from instgenie.server.admission import Admitted
from instgenie.server.bodies.answers import ModelAnswer, ModelsAnswer, images_answer
from instgenie.server.bodies.fields import (
    EditFields,
    GenerationFields,
    ImageFields,
    VariationFields,
    answer_size,
    parse_fields,
)
from instgenie.server.bodies.forms import EditForm, read_edit
from instgenie.server.bodies.pictures import EditSources, blank_edit, cut_out, decode_edit
from instgenie.server.bodies.schema import EDIT, GENERATION, MODEL, MODELS, VARIATION
from instgenie.server.errors import ApiError, JsonResponse, bad, closed, echo, from_user_error, not_found
from instgenie.server.lateness import with_deadline
from instgenie.server.routes.events import EventStream, Submission
from instgenie.server.routes.sending import LargeResponse
from instgenie.server.service import (
    SECONDS_TO_LOAD,
    HttpService,
    deadline_of,
    draw_seed,
    service_of,
    tenant_of,
    trace_of,
)
from instgenie.server.watch import in_time, unless_gone
from instgenie.types import Notes, PixelMask, Pixels

FieldsT = TypeVar("FieldsT", bound=ImageFields)

router = APIRouter(prefix="/v1")


@router.post("/images/edits", summary="Edit a picture", **EDIT)
async def edit_images(request: Request) -> Response:
    return await edit(request, EditFields)


@router.post("/images/variations", summary="Vary a picture", **VARIATION)
async def vary_images(request: Request) -> Response:
    return await edit(request, VariationFields)


async def edit(request: Request, kind: type[EditFields]) -> Response:
    service = service_of(request)
    service.check_open()
    async with service.intake.form(request) as form:
        edit = await service.decoder.run(read_edit, form, kind)
        fields = check_fields(service, edit.fields, edit.notes)
        admitted = service.admit(request, fields.n)
        opening = open_edit(service, tenant_of(request), edit, admitted)
        photo, mask = await unless_gone(request, in_time(deadline_of(request, fields), opening))
    if edit.mask is None and mask.all():
        fields = fields.for_whole_picture(service.model_facts, edit.notes)
    notes = edit.notes
    del edit, form  # their encoded pictures no longer count towards the intake's limit
    fields.describe_answer(photo.source, notes)
    orders = make_orders(request, photo, mask, fields)
    del photo, mask
    orders = await crop_orders(service, admitted, orders, fields, notes)
    if fields.reuse == "template" and (why := service.cluster.why_no_reuse(orders[0])):
        raise bad("reuse", f"The edit cannot use a template: {why}.")
    orders = with_deadline(service, request, orders, fields, notes)
    return await run(Submission(request, service, admitted, orders, fields, notes, "image_edit"))


@router.post("/images/generations", summary="Make a picture from a prompt", **GENERATION)
async def generate_images(request: Request) -> Response:
    service = service_of(request)
    service.check_open()
    async with service.intake.form(request) as form:
        fields = parse_fields(GenerationFields, form)
    fields = check_fields(service, fields, form.notes)
    own_size = service.model_facts.own_size
    height, width = answer_size(fields.size, service.config.max_pixels) or (own_size, own_size)
    admitted = service.admit(request, fields.n)
    admitted.keep(kept_bytes(Header(width, height), None))
    blank, mask = await service.decoder.run(blank_edit, (height, width))
    orders = with_deadline(service, request, make_orders(request, blank, mask, fields), fields, form.notes)
    return await run(Submission(request, service, admitted, orders, fields, form.notes, "image_generation"))


@router.get("/models", summary="List the models", **MODELS)
async def list_models(request: Request) -> Response:
    names = service_of(request).config.served_model_names
    answer = ModelsAnswer(object="list", data=[describe_model(name) for name in names])
    return JsonResponse(answer.model_dump())


@router.get("/models/{model:path}", summary="Describe one model", **MODEL)
async def get_model(request: Request, model: str) -> Response:
    if model not in service_of(request).config.served_model_names:
        raise not_found("model", model, "model_not_found", "model")
    return JsonResponse(describe_model(model).model_dump())


def describe_model(name: str) -> ModelAnswer:
    return ModelAnswer(id=name, object="model", created=0, owned_by="instgenie")


def check_fields(service: HttpService, fields: FieldsT, notes: Notes) -> FieldsT:
    """Check what needs more than one field or the model; return the fields with the values that the model chooses."""
    service.check_model(fields.model, notes)
    service.check_work(fields.num_inference_steps, fields.n)
    fields.check_together()
    fields.describe(notes)
    notes.extend(service.vocabulary.notes(fields.prompt))
    return fields.guided(service.model_facts, notes)


async def open_edit(service: HttpService, tenant: str, edit: EditForm, admitted: Admitted) -> tuple[Photo, PixelMask]:
    """Decode the picture and the mask of an edit, once the headers show that there is room for both."""
    fields, decoder = edit.fields, service.decoder
    size = answer_size(fields.size, decoder.max_pixels)
    try:
        headers = [await decoder.header(edit.mask, MaskError)] if edit.mask else []
        if edit.image is None:
            name = fields.template or ""
            own = template_header(service, tenant, name)
            admitted.keep(kept_bytes(own, size))
            image: bytes | Pixels = await template_picture(service, tenant, name)
        else:
            own = await decoder.header(edit.image, PictureError)
            admitted.keep(kept_bytes(own, size))
            image = edit.image
        sources = EditSources(
            image, edit.mask, fields.mask_mode, size, fields.fit, fields.metadata, fields.reads_alpha, edit.notes
        )
        return await admitted.decode(decoding_bytes(own, *headers), decode_edit, sources, decoder.max_pixels)
    except InstGenieError as error:
        raise from_user_error(error) from None


def template_header(service: HttpService, tenant: str, name: str) -> Header:
    status = service.cluster.template(tenant, name)
    if status is None:
        raise not_found("template", name, "template_not_found", "template")
    return Header(status.width, status.height)


async def template_picture(service: HttpService, tenant: str, name: str) -> Pixels:
    try:
        picture = await service.cluster.picture(tenant, name)
    except ClosedError:
        raise closed("The template's picture cannot be read at present.", SECONDS_TO_LOAD, "unavailable") from None
    if picture is None:
        message = f"The picture of the template {echo(name)} is no longer kept: send it as the image."
        raise ApiError(404, message, "template_picture_dropped", "template")
    return picture


def make_orders(request: Request, photo: Photo, mask: PixelMask, fields: ImageFields) -> list[Order]:
    """Return `fields.n` orders that differ only in their seeds."""
    height, width, _ = photo.pixels.shape
    longest = MAX_SIDE[fields.output_format.upper()]
    if max(height, width) > longest:
        message = f"The result is {width}x{height}: a side of a {fields.output_format} may be {longest} at most."
        raise bad("output_format", message)
    first_seed = draw_seed() if fields.seed is None else fields.seed
    return [
        Order(
            tenant=tenant_of(request),
            picture=photo.pixels,
            mask=mask,
            source=photo.source,
            wish=fields.edit_settings(seed),
            output_format=fields.output_format,
            output_compression=fields.output_compression,
            num_partials=fields.partial_images,
            may_store=fields.store,
            trace=trace_of(request),
        )
        for seed in range(first_seed, first_seed + fields.n)
    ]


async def crop_orders(
    service: HttpService, admitted: Admitted, orders: list[Order], fields: EditFields, notes: Notes
) -> list[Order]:
    """Return the orders of a crop around the mask, if that is what the fields ask for or what serves them best."""
    first, facts = orders[0], service.model_facts
    canvas = Canvas(facts.size_multiple, facts.own_size)
    box = choose_box(first.mask, canvas, fields.crop, fields.crop_padding)
    why_not = fields.why_no_crop(has_asked_for(service.cluster, first)) if box else ""
    describe_crop(box, first.size, fields.crop, why_not, notes)
    if not box or why_not:
        return orders
    admitted.keep(crop_bytes(box))
    picture, mask, whole = await service.decoder.run(cut_out, first.picture, first.mask, first.source, box)
    return [replace(order, picture=picture, mask=mask, source=None, whole=whole) for order in orders]


async def run(submission: Submission) -> Response:
    if submission.fields.stream:
        return EventStream(submission)
    async with submission.watch() as watch:
        results = await unless_gone(submission.request, watch.all())
    decoder, fields, notes = submission.service.decoder, submission.fields, submission.notes
    body = await decoder.run(images_answer, results, watch.errors, fields, notes)
    return LargeResponse(body, media_type="application/json")
