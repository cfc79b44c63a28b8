"""ControlNets that edits may name. They are the server's own, the same for all keys."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from instgenie.cluster.cluster import control_shape_of
from instgenie.server.bodies.models import ControlNetsAnswer, describe_controlnet
from instgenie.server.bodies.schema import CONTROLNETS
from instgenie.server.errors import JsonResponse
from instgenie.server.service import service_of

router = APIRouter(prefix="/v1/controlnets")


@router.get("", summary="List the ControlNets that you may name", **CONTROLNETS)
async def list_controlnets(request: Request) -> Response:
    service = service_of(request)
    model, shape = service.config.served_model_names[0], control_shape_of(service.cluster)
    found = [describe_controlnet(one, model, shape) for one in service.controlnets.list()]
    return JsonResponse(ControlNetsAnswer(object="list", data=found).model_dump())
