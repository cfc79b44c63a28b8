"""LoRAs that edits may name. Knows names and tenants; another tenant's LoRA is answered like one that does not
exist."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from instgenie.adapters.registry import RegisteredLora
from instgenie.cluster.cluster import layers_of
from instgenie.errors import LoraError
from instgenie.server.bodies.fields import LoraFields, parse_fields
from instgenie.server.bodies.models import LoraAnswer, LoraRemoved, LorasAnswer, describe_lora
from instgenie.server.bodies.schema import LORA, LORAS, ONE_LORA, REMOVED_LORA
from instgenie.server.errors import JsonResponse, bad, from_lora_error
from instgenie.server.service import HttpService, service_of, tenant_of

router = APIRouter(prefix="/v1/loras")


@router.post("", summary="Give a name to a LoRA file of the server's folder", status_code=201, **LORA)
async def add_lora(request: Request) -> Response:
    service = service_of(request)
    service.check_open()
    async with service.intake.form(request) as form:
        fields = parse_fields(LoraFields, form)
    name, path = fields.name or fields.lora_name, fields.path or fields.lora_path
    if name is None or path is None:
        missing = "name" if name is None else "path"
        raise bad(missing, f"The field {missing!r} is missing.", "missing_required_parameter")
    service.loras.table = layers_of(service.cluster)
    try:
        added = await service.decoder.run(service.loras.add, name, path, tenant_of(request))
    except LoraError as error:
        raise from_lora_error(error) from None
    return JsonResponse(describe(service, added).model_dump(), 201)


@router.get("", summary="List the LoRAs that you may name", **LORAS)
async def list_loras(request: Request) -> Response:
    service = service_of(request)
    found = await service.decoder.run(service.loras.list, tenant_of(request))
    return JsonResponse(LorasAnswer(object="list", data=[describe(service, one) for one in found]).model_dump())


@router.get("/{name}", summary="Describe one LoRA", **ONE_LORA)
async def get_lora(request: Request, name: str) -> Response:
    service = service_of(request)
    try:
        found = await service.decoder.run(service.loras.find, name, tenant_of(request))
    except LoraError as error:
        raise from_lora_error(error, "name") from None
    return JsonResponse(describe(service, found).model_dump())


@router.delete("/{name}", summary="Take the name of a LoRA away", **REMOVED_LORA)
async def delete_lora(request: Request, name: str) -> Response:
    service = service_of(request)
    try:
        service.loras.remove(name, tenant_of(request))
    except LoraError as error:
        raise from_lora_error(error, "name") from None
    return JsonResponse(LoraRemoved(id=name, object="lora", deleted=True).model_dump())


def describe(service: HttpService, lora: RegisteredLora) -> LoraAnswer:
    return describe_lora(lora, service.config.served_model_names[0])
