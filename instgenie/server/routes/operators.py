"""Endpoints for operators: liveness, readiness, status, metrics."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from instgenie.server.bodies.schema import HEALTH, METRICS, STATUS
from instgenie.server.bodies.status import status_answer
from instgenie.server.errors import JsonResponse
from instgenie.server.service import service_of

router = APIRouter()


@router.get("/health", summary="Can the server run edits, now or soon?", **HEALTH)
async def health(request: Request) -> Response:
    cluster = service_of(request).cluster
    if cluster.healthy:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": "broken", "message": "; ".join(cluster.problems)}, 503)


@router.get("/ready", summary="Does the server accept new work?", **HEALTH)
async def ready(request: Request) -> Response:
    service = service_of(request)
    if service.ready:
        return JsonResponse({"status": "ok"})
    status = "draining" if service.draining else "loading" if service.cluster.healthy else "broken"
    return JsonResponse({"status": status}, 503)


@router.get("/status", summary="The cluster: nodes, workers, queue, activations", **STATUS)
async def status(request: Request) -> Response:
    return JsonResponse(status_answer(service_of(request), request.app.version).model_dump())


@router.get("/metrics", summary="Metrics for Prometheus", **METRICS)
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
