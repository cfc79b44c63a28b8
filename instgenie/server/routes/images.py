"""OpenAI's images API: edits, generations, models. Knows the path of a request; `bodies` knows the shapes."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from instgenie.cluster.cluster import has_asked_for
from instgenie.cluster.ledger import KeyClaim
from instgenie.cluster.orders import Order
from instgenie.errors import LoraError
from instgenie.jobs.strength import FROM_SURROUNDINGS
from instgenie.pictures.cropping import Canvas, choose_box, describe_crop
from instgenie.pictures.fitting import crop
from instgenie.pictures.header import Header, crop_bytes, kept_bytes
from instgenie.pictures.photo import Photo
from instgenie.pictures.picture import MAX_SIDE
from instgenie.server.admission import Admitted
from instgenie.server.bodies.answers import EditPending, images_answer
from instgenie.server.bodies.controls import is_word
from instgenie.server.bodies.fields import (
    EditFields,
    GenerationFields,
    ImageFields,
    VariationFields,
    answer_size,
    parse_fields,
)
from instgenie.server.bodies.forms import (
    EditForm,
    check_references,
    read_edit,
    take_control_files,
    with_control_files,
)
from instgenie.server.bodies.models import ModelsAnswer, describe_as_model, describe_model
from instgenie.server.bodies.pictures import (
    blank_edit,
    cut_out,
)
from instgenie.server.bodies.schema import EARLIER, EDIT, GENERATION, MODEL, MODELS, VARIATION
from instgenie.server.errors import (
    JsonResponse,
    bad,
    from_lora_error,
    not_found,
)
from instgenie.server.idempotency import digest, fingerprint_of, key_of, sent_fields
from instgenie.server.lateness import with_deadline
from instgenie.server.routes.events import EventStream, Repetition, Submission, answer_headers
from instgenie.server.routes.opening import open_controls, open_edit, open_references
from instgenie.server.routes.sending import LargeResponse
from instgenie.server.runs import DepositedRequest, EditRun
from instgenie.server.service import (
    HttpService,
    deadline_of,
    draw_seed,
    service_of,
    tenant_of,
    trace_of,
)
from instgenie.server.watch import in_time, unless_gone
from instgenie.types import ControlUse, LoraUse, Notes, PixelMask, Pixels

FieldsT = TypeVar("FieldsT", bound=ImageFields)

PENDING = {
    True: "The edit is not done yet.",
    False: "Another server has the edit, or had it and is gone: send the request again with its key to follow it here.",
}

router = APIRouter(prefix="/v1")


@router.post("/images/edits", summary="Edit a picture", **EDIT)
async def edit_images(request: Request) -> Response:
    return await edit(request, EditFields)


@router.post("/images/variations", summary="Vary a picture", **VARIATION)
async def vary_images(request: Request) -> Response:
    return await edit(request, VariationFields)


async def edit(request: Request, kind: type[EditFields]) -> Response:
    service_of(request).check_open()
    return await run_edit(request, read_body(request, kind))


@asynccontextmanager
async def read_body(request: Request, kind: type[EditFields]) -> AsyncIterator[EditForm]:
    service = service_of(request)
    async with service.intake.form(request) as form:
        yield await service.decoder.run(read_edit, form, kind)


async def run_edit(
    request: Request, body: AbstractAsyncContextManager[EditForm], claim: KeyClaim | None = None
) -> Response:
    """Run an edit, or follow the one with its key. A claim is that of an earlier request, whose body this is."""
    service = service_of(request)
    async with body as edit:
        fields = check_fields(service, edit.fields, edit.notes, tenant_of(request))
        check_references(len(edit.references), service.model_facts.max_references)
        loras = await service.find_loras(tenant_of(request), fields)
        controls = service.find_controls(fields)
        if run := await enter_run(request, fields, claim, edit.image, edit.mask, edit.references):
            if run.tickets:
                return await answer(repetition(request, run, fields))
            fields = fields.seeded(run.seed)
        admitted = service.admit(request, fields.n)
        opening = open_edit(service, tenant_of(request), edit, admitted)
        photo, mask = await unless_gone(request, in_time(deadline_of(request, fields), opening))
        references = await open_references(service, edit, admitted)
    if fields.masked_content == "surroundings":
        if mask.all():
            raise bad("masked_content", "The mask covers the whole picture: there are no surroundings to start from.")
        if not service.model_facts.removes:  # one that is trained to remove does so best from noise
            fields = fields.with_strength(service.model_facts, FROM_SURROUNDINGS)
    elif edit.mask is None and mask.all():
        fields = fields.for_whole_picture(service.model_facts, edit.notes)
    notes = edit.notes
    del edit  # its encoded pictures no longer count towards the intake's limit
    fields.describe_answer(photo.source, notes)
    images = await open_controls(service, admitted, fields, photo.pixels)
    orders = make_orders(request, photo, mask, fields, loras, controls, images)
    orders = [replace(order, references=references) for order in orders]
    del photo, mask, references, images
    orders = await crop_orders(service, admitted, orders, fields, notes)
    if fields.reuse == "template" and (why := service.cluster.why_no_reuse(orders[0])):
        raise bad("reuse", f"The edit cannot use a template: {why}.")
    orders = with_deadline(service, request, orders, fields, notes)
    return await answer(Submission(request, service, admitted, orders, fields, notes, "image_edit", run))


@router.post("/images/generations", summary="Make a picture from a prompt", **GENERATION)
async def generate_images(request: Request) -> Response:
    service = service_of(request)
    service.check_open()
    async with service.intake.form(request) as form:
        files = take_control_files(form)
        fields = with_control_files(parse_fields(GenerationFields, form), files)
    return await run_generation(request, fields, form.notes)


async def run_generation(
    request: Request, fields: GenerationFields, notes: Notes, claim: KeyClaim | None = None
) -> Response:
    service = service_of(request)
    fields = check_fields(service, fields, notes, tenant_of(request))
    loras = await service.find_loras(tenant_of(request), fields)
    controls = service.find_controls(fields)
    if any(is_word(control["image"]) for control in fields.controls):
        raise bad("controls", "A generation has no picture whose edges could be drawn: send the control image.")
    if run := await enter_run(request, fields, claim):
        if run.tickets:
            return await answer(repetition(request, run, fields))
        fields = fields.seeded(run.seed)
    own_size = service.model_facts.own_size
    height, width = answer_size(fields.size, service.config.max_pixels) or (own_size, own_size)
    admitted = service.admit(request, fields.n)
    admitted.keep(kept_bytes(Header(width, height), None))
    blank, mask = await service.decoder.run(blank_edit, (height, width))
    images = await open_controls(service, admitted, fields, blank.pixels)
    orders = make_orders(request, blank, mask, fields, loras, controls, images)
    orders = with_deadline(service, request, orders, fields, notes)
    return await answer(Submission(request, service, admitted, orders, fields, notes, "image_generation", run))


@router.get("/images/edits/{id}", summary="The answer to an earlier request with an idempotency key", **EARLIER)
async def get_edit(request: Request, id: str) -> Response:
    service = service_of(request)
    found = await service.idempotency.find(tenant_of(request), id)
    if found is None:
        raise not_found("edit", id, "edit_not_found", "id")
    if isinstance(found, EditRun) and found.is_whole:
        body = await service.decoder.run(images_answer, found.results, {}, found.fields, found.notes)
        return LargeResponse(body, media_type="application/json")
    if isinstance(found, KeyClaim) and (deposited := await service.idempotency.request_of(found)):
        return await resume(request, found, deposited)
    message = PENDING[isinstance(found, EditRun)]
    return JsonResponse(EditPending(id=id, object="edit", state="running", message=message).model_dump(), 202)


async def resume(request: Request, claim: KeyClaim, body: DepositedRequest) -> Response:
    """Go on with a request that another server took, and answer it here."""
    service_of(request).check_open()
    if body.kind == GenerationFields.__name__:
        return await run_generation(request, GenerationFields.model_validate(body.fields), [], claim)
    kind = {one.__name__: one for one in (EditFields, VariationFields)}[body.kind]
    form = EditForm(kind.model_validate(body.fields), body.image, body.mask, [], body.references)
    return await run_edit(request, nullcontext(form), claim)


@router.get("/models", summary="List the models", **MODELS)
async def list_models(request: Request) -> Response:
    service = service_of(request)
    names, facts = service.config.served_model_names, service.cluster.model_facts
    loras = await service.decoder.run(service.loras.list, tenant_of(request))
    listed = [describe_model(name, facts) for name in names]
    listed += [describe_as_model(lora, names[0]) for lora in loras]
    listed += [describe_as_model(net, names[0]) for net in service.controlnets.list()]
    return JsonResponse(ModelsAnswer(object="list", data=listed).model_dump(exclude_none=True))


@router.get("/models/{model:path}", summary="Describe one model", **MODEL)
async def get_model(request: Request, model: str) -> Response:
    service, tenant = service_of(request), tenant_of(request)
    names = service.config.served_model_names
    if model not in names and service.loras.has(model, tenant):
        try:
            lora = await service.decoder.run(service.loras.find, model, tenant)
        except LoraError as error:
            raise from_lora_error(error, "model") from None
        return JsonResponse(describe_as_model(lora, names[0]).model_dump(exclude_none=True))
    if model not in names and service.controlnets.has(model):
        net = service.controlnets.find(model)
        return JsonResponse(describe_as_model(net, names[0]).model_dump(exclude_none=True))
    if model not in names:
        raise not_found("model", model, "model_not_found", "model")
    return JsonResponse(describe_model(model, service.cluster.model_facts).model_dump(exclude_none=True))


def check_fields(service: HttpService, fields: FieldsT, notes: Notes, tenant: str) -> FieldsT:
    """Check what needs more than one field or the model; return the fields with the values that the model chooses. A
    LoRA may be named as the model, since it is listed as one."""
    model, names = fields.model, service.config.served_model_names
    if model and model not in names and service.loras.has(model, tenant):
        named = [{"name": model, "scale": 1.0}] if model not in fields.lora_names else []
        fields = fields.model_copy(update={"loras": [*named, *fields.loras], "model": None})
    service.check_model(fields.model, notes)
    service.check_work(fields.num_inference_steps, fields.n)
    fields.check_together()
    fields.describe(notes)
    notes.extend(service.vocabulary.notes(fields.prompt))
    return fields.guided(service.model_facts, notes)


def make_orders(
    request: Request,
    photo: Photo,
    mask: PixelMask,
    fields: ImageFields,
    loras: tuple[LoraUse, ...],
    controls: tuple[ControlUse, ...],
    control_images: tuple[Pixels, ...],
) -> list[Order]:
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
            wish=replace(fields.edit_settings(seed), loras=loras, controls=controls),
            control_images=control_images,
            output_format=fields.output_format,
            output_compression=fields.output_compression,
            num_partials=fields.partial_images,
            may_store=fields.store,
            trace=trace_of(request),
            sees_picture=service_of(request).model_facts.sees_picture and not isinstance(fields, GenerationFields),
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
    images = tuple(crop(image, box).copy() for image in first.control_images)
    return [
        replace(order, picture=picture, mask=mask, control_images=images, source=None, whole=whole) for order in orders
    ]


async def enter_run(
    request: Request,
    fields: ImageFields,
    claim: KeyClaim | None,
    image: bytes | None = None,
    mask: bytes | None = None,
    references: tuple[bytes, ...] = (),
) -> EditRun | None:
    """The run of a request's idempotency key; None: it has none. A run without tickets is to be submitted."""
    service, kind = service_of(request), type(fields).__name__
    if claim is None:
        key = key_of(request, fields)
        if key is None:
            return None
        fingerprint = await service.decoder.run(fingerprint_of, kind, fields, image, mask, *references)
        claim = KeyClaim(digest(tenant_of(request), key), fingerprint)
    run = await unless_gone(request, service.idempotency.enter(request, tenant_of(request), claim))
    if not run.tickets and service.cluster.deposits.is_shared:
        run.request = DepositedRequest(kind, sent_fields(fields), image, mask, references)
    return run


def repetition(request: Request, run: EditRun, fields: ImageFields) -> Repetition:
    notes = [*run.notes, "The edit is that of an earlier request with the same idempotency key: it ran once."]
    return Repetition(request, service_of(request), run, fields, notes, run.prefix)


async def answer(submission: Submission | Repetition) -> Response:
    if isinstance(submission, Submission) and submission.run:
        run = submission.run
        run.fields, run.notes, run.prefix = submission.fields, submission.notes, submission.prefix
    if submission.fields.stream:
        return EventStream(submission)
    async with submission.watch() as watch:
        results = await unless_gone(submission.request, watch.all())
    decoder, fields, notes = submission.service.decoder, submission.fields, submission.notes
    body = await decoder.run(images_answer, results, watch.errors, fields, notes)
    return LargeResponse(body, media_type="application/json", headers=answer_headers(submission))
