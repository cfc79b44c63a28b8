"""The body of `GET /status`: the cluster as one front sees it. Names no template, picture, prompt or key."""

import math
from collections import Counter
from typing import Literal

from instgenie.cluster.status import NodeStatus, ProcessStatus, WorkerStatus
from instgenie.server.bodies.answers import AnswerBody
from instgenie.server.service import HttpService
from instgenie.types import TierName

ServerState = Literal["ready", "loading", "draining", "broken"]
WorkerState = Literal["starting", "ready", "down", "failed", "waiting", "draining"]


class NodeAnswer(AnswerBody):
    name: str
    address: str
    num_cores: int
    available_bytes: int | None  # of main memory; null: unknown
    num_workers: int


class ProcessAnswer(AnswerBody):
    role: str
    state: str
    pid: int | None  # on its own node; null: not running
    num_restarts: int
    message: str  # why it is down


class ServiceAnswer(ProcessAnswer):
    num_controlnets: int  # in its memory
    controlnet_bytes: int
    num_loads: int  # of ControlNets, since it started


class WorkerAnswer(AnswerBody):
    index: int
    node: str | None  # null: on the front's machine, or waiting for a node
    device: str
    state: WorkerState
    num_running: int  # edits of this front in its batch
    num_waiting: int  # edits of this front
    steps_per_second: float
    predicted_seconds: float  # until all its work is done, with that of other fronts
    num_templates: int
    tier_bytes: dict[TierName, int]
    lora_bytes: dict[str, int]  # of LoRAs in its memory, by tier
    processes: list[ProcessAnswer]


class StatusAnswer(AnswerBody):
    model: str
    version: str
    state: ServerState
    max_batch_size: int
    max_queue: int
    num_running: int
    num_waiting: int
    num_registrations_waiting: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_cache_queries: int
    cache_hits: dict[TierName, int]
    fronts: list[str]  # addresses of all fronts; empty: this one is alone
    nodes: list[NodeAnswer]  # empty: all workers are on this machine
    workers: list[WorkerAnswer]
    services: list[ServiceAnswer]  # processes of ControlNets, and companions of workers


def status_answer(service: HttpService, version: str) -> StatusAnswer:
    status, config = service.cluster.status(), service.cluster.config
    num_workers = Counter(worker.node for worker in status.workers)
    return StatusAnswer(
        model=service.config.served_model_names[0],
        version=version,
        state=server_state(service),
        max_batch_size=config.max_batch_size,
        max_queue=config.max_queue,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_registrations_waiting=status.num_registrations_waiting,
        num_finished=status.num_finished,
        num_failed=status.num_failed,
        num_cancelled=status.num_cancelled,
        num_cache_queries=status.num_cache_queries,
        cache_hits=status.cache_hits,
        fronts=list(status.fronts),
        nodes=[node_answer(node, num_workers[node.name]) for node in status.nodes],
        workers=[worker_answer(worker, has_nodes=bool(status.fronts)) for worker in status.workers],
        services=[service_answer(service) for service in status.services],
    )


def server_state(service: HttpService) -> ServerState:
    if service.draining:
        return "draining"
    if service.ready:
        return "ready"
    return "loading" if service.cluster.healthy else "broken"


def node_answer(node: NodeStatus, num_workers: int) -> NodeAnswer:
    return NodeAnswer(
        name=node.name,
        address=node.address,
        num_cores=node.num_cores,
        available_bytes=int(node.available_bytes) if math.isfinite(node.available_bytes) else None,
        num_workers=num_workers,
    )


def worker_answer(worker: WorkerStatus, has_nodes: bool) -> WorkerAnswer:
    return WorkerAnswer(
        index=worker.index,
        node=worker.node or None,
        device=worker.device,
        state=worker_state(worker, has_nodes),
        num_running=len(worker.running),
        num_waiting=worker.num_waiting,
        steps_per_second=round(worker.steps_per_second, 3),
        predicted_seconds=round(worker.predicted_seconds, 3),
        num_templates=len(worker.templates),
        tier_bytes=worker.tier_bytes,
        lora_bytes=worker.lora_bytes,
        processes=[process_answer(process) for process in worker.processes],
    )


def worker_state(worker: WorkerStatus, has_nodes: bool) -> WorkerState:
    if has_nodes and not worker.node:
        return "waiting"
    return "draining" if worker.is_draining else worker.state


def service_answer(process: ProcessStatus) -> ServiceAnswer:
    kept = process.controlnets
    return ServiceAnswer(
        **process_answer(process).model_dump(),
        num_controlnets=kept.num_kept if kept else 0,
        controlnet_bytes=kept.num_bytes if kept else 0,
        num_loads=kept.num_loads if kept else 0,
    )


def process_answer(process: ProcessStatus) -> ProcessAnswer:
    return ProcessAnswer(
        role=process.role,
        state=process.state,
        pid=process.pid,
        num_restarts=process.num_restarts,
        message=process.message,
    )
