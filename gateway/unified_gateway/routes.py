"""HTTP routes of the gateway: training runs, metrics and service discovery."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from unified.errors import MasterUnreachableError, UnifiedError, UsageError
from unified.training.arguments import values_by_method
from unified_gateway.backend import RunRecord
from unified_gateway.http.log_stream import ClosingStream, stream_events
from unified_gateway.runs import SubmitOutcome, newest_first
from unified_gateway.schemas import (
    ConflictBody,
    DryRun,
    ErrorBody,
    MetricsInfo,
    ResumeRequest,
    RunCheckpoints,
    RunEventInfo,
    RunEvents,
    RunList,
    RunMetrics,
    RunState,
    TrainingJobStatus,
    TrainingRequest,
    ValidationBody,
)
from unified_gateway.service import Gateway, status_of

JSON = "application/json"
MAX_TAIL = 64 << 20
Responses = dict[int | str, dict[str, Any]]
COMMON: Responses = {
    401: {"model": ErrorBody, "description": "The token is missing or wrong."},
    422: {"model": ValidationBody, "description": "A field is missing, unknown or not allowed."},
    429: {"model": ErrorBody, "description": "Too many requests of this client; Retry-After says when to come back."},
    503: {"model": ErrorBody, "description": "The cluster cannot be reached now; Retry-After says when to come back."},
}
NOT_FOUND: Responses = {404: {"model": ErrorBody, "description": "There is no run of this name."}}
CONFLICT: Responses = {
    409: {"model": ConflictBody, "description": "Another payload has this run id, or the run goes on."}
}
TOO_LARGE: Responses = {413: {"model": ErrorBody, "description": "The body is larger than 1 MiB."}}

open_routes = APIRouter()
routes = APIRouter(responses=COMMON)
Limit = Annotated[int, Query(ge=1, le=10_000)]


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


@open_routes.get("/healthz", summary="Tell that the gateway runs", tags=["service"])
async def healthz() -> dict[str, str]:
    """Answer without a token. Whether the cluster can be reached is another matter: `/metrics` tells."""
    return {"status": "ok"}


@routes.get(
    "/metrics",
    summary="Metrics of the cluster and of the gateway, for Prometheus",
    tags=["service"],
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    gateway = _gateway(request)
    try:
        runs: Iterable[RunRecord] | None = (await gateway.runs.cache.snapshot()).by_name.values()
    except UnifiedError:
        runs = None
    text = gateway.telemetry.render(runs, await gateway.mirror())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@routes.get("/sd/prometheus", summary="Addresses of the agents' metrics, for Prometheus", tags=["service"])
async def discover(request: Request) -> list[dict[str, Any]]:
    """Answer as the HTTP service discovery of Prometheus reads it: those agents that were given `--metrics-bind`."""
    mirror = await _gateway(request).mirror()
    if mirror is None:
        raise MasterUnreachableError("the master does not answer.")
    nodes = (mirror.nodes[name] for name in sorted(mirror.nodes))
    return [{"targets": [node.metrics], "labels": {"node": node.node}} for node in nodes if node.metrics]


@routes.post(
    "/train",
    status_code=201,
    summary="Submit a training job",
    tags=["runs"],
    response_model=TrainingJobStatus | DryRun,
    responses={
        200: {"model": TrainingJobStatus | DryRun, "description": "The job that the same payload made before."},
        **CONFLICT,
        **TOO_LARGE,
    },
)
async def submit(payload: TrainingRequest, request: Request, dry_run: bool = False) -> Response:
    """Begin a run, or find the one that the same payload began. `dry_run` shows the job and begins nothing."""
    runs = _gateway(request).runs
    if dry_run:
        plan = runs.plan(payload)
        namespace = payload.namespace or runs.backend.default_namespace
        job = runs.backend.describe(plan)
        values = values_by_method(payload.arguments)
        found = DryRun(name=plan.name, backend=runs.backend.name, namespace=namespace, job=job, arguments=values)
        return Response(found.model_dump_json(), media_type=JSON)
    return _submitted(await runs.submit(payload))


@routes.get("/train", summary="List training jobs", tags=["runs"])
async def list_runs(
    request: Request,
    status: Annotated[list[RunState] | None, Query(description="Only runs in one of these states.")] = None,
    framework: str | None = None,
    run_id: str | None = None,
    label: Annotated[list[str] | None, Query(description="Labels that a run has, as `name=value`.")] = None,
    all_attempts: Annotated[bool, Query(description="Earlier attempts at a run too.")] = False,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=200, description="`next` of the page before.")] = None,
) -> RunList:
    """List runs, newest first, as they were at most a second ago."""
    snapshot = await _gateway(request).runs.cache.snapshot()
    labels = dict(_label(text) for text in label or ())
    found = [
        run
        for run in (snapshot.attempts if all_attempts else sorted(snapshot.by_name.values(), key=newest_first))
        if (not status or run.status in status)
        and (framework is None or run.framework == framework)
        and (run_id is None or run.run_id == run_id)
        and labels.items() <= dict(run.labels).items()
    ]
    after = _cursor(cursor)
    page = [run for run in found if after is None or newest_first(run) > after]
    more = _cursor_of(page[limit - 1]) if len(page) > limit else None
    return RunList(items=[status_of(run) for run in page[:limit]], total=len(found), next=more)


@routes.get(
    "/train/{name}",
    summary="Get the status of a job",
    tags=["runs"],
    response_model=TrainingJobStatus,
    responses=NOT_FOUND,
)
async def get_status(name: str, request: Request) -> Response:
    """Return a run as it was at most a second ago."""
    return Response(await _gateway(request).status_body(name), media_type=JSON)


@routes.delete(
    "/train/{name}",
    status_code=202,
    summary="Stop a job",
    tags=["runs"],
    response_model=TrainingJobStatus,
    responses=NOT_FOUND,
)
async def stop(name: str, request: Request, force: bool = False) -> Response:
    """Stop a run in order, after a checkpoint; with `force` at once. One that has ended stays as it is."""
    run = await _gateway(request).runs.stop(name, force=force)
    return Response(status_of(run).model_dump_json(), status_code=202, media_type=JSON)


@routes.post(
    "/train/{name}/resume",
    status_code=201,
    summary="Resume a job that has ended",
    tags=["runs"],
    response_model=TrainingJobStatus,
    responses={**NOT_FOUND, **CONFLICT, **TOO_LARGE},
)
async def resume(name: str, request: Request, changes: ResumeRequest | None = None) -> Response:
    """Begin another attempt with the payload of the last one, from the highest complete checkpoint."""
    run = await _gateway(request).runs.resume(name, changes or ResumeRequest())
    return _submitted(SubmitOutcome(run, is_new=True))


@routes.get(
    "/train/{name}/logs",
    summary="Read or follow what a job prints",
    tags=["runs"],
    response_class=Response,
    responses={
        **NOT_FOUND,
        200: {
            "description": "Lines; with `follow`, server-sent events `line`, `error` and `end`.",
            "content": {"text/plain": {"schema": {"type": "string"}}, "text/event-stream": {}},
        },
    },
)
async def logs(
    name: str,
    request: Request,
    follow: bool = False,
    rank: Annotated[int | None, Query(ge=0, description="Only this rank.")] = None,
    tail_bytes: Annotated[
        int | None, Query(ge=1, le=MAX_TAIL, description="Begin that far before the end of each rank's output.")
    ] = None,
) -> Response:
    """Return the lines that the ranks printed, each with its rank in front."""
    gateway = _gateway(request)
    run = await gateway.runs.run(name)
    gateway.check_followers()
    lines = gateway.runs.backend.logs(name, rank=rank, follow=follow, tail_bytes=tail_bytes)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the latter is for nginx
    if not follow:
        return ClosingStream(_followed(gateway, _text(lines)), media_type="text/plain", headers=headers)

    async def final() -> str:
        """Return the status of the attempt that was followed; another may have begun."""
        now = await gateway.runs.run(name)
        if now.job_id != run.job_id:
            attempts = (await gateway.runs.cache.snapshot()).attempts
            now = next((each for each in attempts if each.job_id == run.job_id), run)
        return status_of(now).model_dump_json()

    events = _followed(gateway, stream_events(lines, final))
    return ClosingStream(events, media_type="text/event-stream", headers=headers)


@routes.get("/train/{name}/events", summary="List decisions about a job", tags=["runs"], responses=NOT_FOUND)
async def events(name: str, request: Request, limit: Limit = 200) -> RunEvents:
    """Return the newest decisions of the cluster about a run, each with its reason."""
    runs = _gateway(request).runs
    await runs.run(name)
    found = await runs.backend.events(name, limit=limit)
    return RunEvents(items=[RunEventInfo.model_validate(each, from_attributes=True) for each in found])


@routes.get("/train/{name}/metrics", summary="Read the metrics of a job", tags=["runs"], responses=NOT_FOUND)
async def run_metrics(
    name: str,
    request: Request,
    since: Annotated[float, Query(ge=0, description="Only what was reported later, in seconds since 1970.")] = 0.0,
    limit: Limit = 1000,
) -> RunMetrics:
    """Return what rank 0 has reported, a point for each step: loss, throughput. Of old points some are kept."""
    runs = _gateway(request).runs
    await runs.run(name)
    found = await runs.backend.metrics(name, since=since, limit=limit)
    items = [MetricsInfo.model_validate(each, from_attributes=True) for each in found.reports]
    return RunMetrics(items=items, num_thinned=found.num_thinned)


@routes.get("/train/{name}/checkpoints", summary="List checkpoints of a job", tags=["runs"], responses=NOT_FOUND)
async def checkpoints(name: str, request: Request, limit: Limit = 100) -> RunCheckpoints:
    """Return the checkpoints that the run can be resumed from, as its store has them now."""
    gateway = _gateway(request)
    layout = await gateway.layout(name)
    return RunCheckpoints(prefix=layout.prefix, items=await gateway.checkpoints.read(layout, limit))


def _submitted(outcome: SubmitOutcome) -> Response:
    run = outcome.run
    if not outcome.is_new and run.status == "failed":
        detail = f"{run.detail.rstrip('.') or 'failed'}. POST /train/{run.name}/resume goes on from its checkpoints."
        run = replace(run, detail=detail)
    status = 201 if outcome.is_new else 200
    headers = {"location": f"/train/{run.name}"}
    return Response(status_of(run).model_dump_json(), status_code=status, media_type=JSON, headers=headers)


async def _text(lines: AsyncIterator[str]) -> AsyncGenerator[bytes]:
    async for line in lines:
        yield f"{line}\n".encode(errors="replace")


async def _followed(gateway: Gateway, parts: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    with gateway.following():
        async with aclosing(parts):
            async for part in parts:
                yield part


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"label={text!r}: write name=value.")
    return name, value


def _cursor_of(run: RunRecord) -> str:
    return json.dumps(newest_first(run), separators=(",", ":"))


def _cursor(text: str | None) -> tuple[float, str] | None:
    if text is None:
        return None
    try:
        at, job_id = json.loads(text)
        if isinstance(at, int | float) and isinstance(job_id, str):
            return float(at), job_id
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass
    raise UsageError("cursor is invalid: give the `next` of a page.")
