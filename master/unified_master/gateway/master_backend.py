"""Training runs as jobs of our own master: one elastic role of ``python -m unified.training``."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from unified.client.connection import MasterConnection, PendingReply, connect_to
from unified.client.logs import LogFilter, LogReader, Mode
from unified.client.report import first_line
from unified.client.reports import read_reports
from unified.errors import MasterUnreachableError, RefusedError
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
from unified.protocol.client_master import (
    Accepted,
    ClientRequest,
    Done,
    Explain,
    GetJob,
    JobLine,
    JobList,
    JobStatus,
    ListJobs,
    StopJob,
    Story,
    SubmitJob,
)
from unified.protocol.records import Stage
from unified_master.gateway.backend import (
    FRAMEWORK_LABEL,
    KIND,
    KIND_LABEL,
    NAMESPACE_LABEL,
    REQUEST_ANNOTATION,
    RUN_ID_LABEL,
    MetricsRow,
    NameTakenError,
    RunEvent,
    RunPlan,
    RunRecord,
    Submitted,
)
from unified_master.gateway.plan import user_labels
from unified_master.gateway.schemas import RunState

ROLE = "trainer"
MODULE = "unified.training"
ROLE_MAX_RESTART = 3
"""Restarts of a run after failures of its own; lost nodes are not counted."""
STOP_GRACE_S = 60.0
"""Seconds in which a run that is stopped may save a checkpoint."""
NUM_LOG_THREADS = 16
NUM_METRIC_THREADS = 4
METRICS_WITHIN_S = 15.0
LINES_AT_ONCE = 500
STATUS_EVERY_S = 1.0
MASTER_GRACE_S = 300.0
"""Seconds for which a reader of logs bears a master that is away."""
A = TypeVar("A")
T = TypeVar("T")


class MasterBackend:
    """A master as `TrainingBackend`.

    Args:
        address: ``tcp://HOST:PORT``.
        shares_host: the cluster is this host alone: runs are placed by their devices, whatever CPUs and memory they
            ask for.
    """

    name = "master"
    default_namespace = "default"

    def __init__(self, address: str, *, shares_host: bool = False) -> None:
        self.address = address
        self._shares_host = shares_host
        self._connection = connect_to(address)
        self._threads = ThreadPoolExecutor(NUM_LOG_THREADS, thread_name_prefix="unified-gateway-logs")
        self._metric_threads = ThreadPoolExecutor(NUM_METRIC_THREADS, thread_name_prefix="unified-gateway-metrics")

    async def submit(self, plan: RunPlan, *, follows: str) -> Submitted:
        spec = job_spec(plan, shares_host=self._shares_host)
        request = SubmitJob(spec=spec, follows=follows, kept_env=list(plan.kept_env), unique_labels=[RUN_ID_LABEL])
        try:
            return Submitted(job_id=(await self._ask(request, Accepted)).job_id)
        except RefusedError as error:
            if error.code == "name-taken":
                raise NameTakenError(error.reason) from None
            raise

    async def get(self, name: str) -> RunRecord | None:
        found = await self._job(name)
        if found is not None and found.name != name:  # `name` is the id of a job that has another
            lines = [line for line in await self._lines({}) if line.name == name]
            newest = max(lines, key=lambda line: line.submitted_at, default=None)
            found = None if newest is None else await self._job(newest.job_id)
        return None if found is None else _record(found)

    async def find_run(self, run_id: str) -> RunRecord | None:
        lines = await self._lines({KIND_LABEL: KIND, RUN_ID_LABEL: run_id})
        newest = max(lines, key=lambda line: line.submitted_at, default=None)
        found = None if newest is None else await self._job(newest.job_id)
        return None if found is None else _record(found)

    async def runs(self) -> list[RunRecord]:
        lines = await self._lines({KIND_LABEL: KIND})
        return [_record(line) for line in sorted(lines, key=lambda line: (-line.submitted_at, line.job_id))]

    async def stop(self, name: str, *, force: bool) -> None:
        run = await self.get(name)
        if run is not None and not run.is_ended:
            await self._ask(StopJob(job=run.job_id, force=force, reason="asked through the training API"), Done)

    async def logs(self, name: str, *, rank: int | None, follow: bool, tail_bytes: int | None) -> AsyncIterator[str]:
        job_id = await self._job_id(name)
        wanted = LogFilter(ROLE, rank)
        mode: Mode = "live" if follow else "once"
        reader = LogReader(self._open_connection(), job_id, wanted, mode=mode, tail_bytes=tail_bytes)
        seen_at = status_at = time.monotonic()
        status: JobStatus | None = await self._ask(GetJob(job=job_id), JobStatus)
        while True:
            if status is not None:
                reader.update(status)
            is_over = not follow or (status is not None and status.stage is Stage.STOPPED)
            async for line in self._in_thread(reader.rest() if is_over else reader.pull_lines()):
                yield line
            if is_over:
                return
            await asyncio.sleep(max(reader.pause_s(), 0.05))
            status, now = None, time.monotonic()
            if now - status_at >= STATUS_EVERY_S:
                status_at = now
                try:
                    status = await self._ask(GetJob(job=job_id), JobStatus)
                    seen_at = time.monotonic()
                except MasterUnreachableError:
                    if time.monotonic() - seen_at > MASTER_GRACE_S:
                        raise

    async def events(self, name: str, *, limit: int) -> list[RunEvent]:
        story = await self._ask(Explain(job=await self._job_id(name), limit=limit), Story)
        return [
            RunEvent(at=each.at, event=each.event, reason=each.reason, worker=each.worker, node=each.node)
            for each in story.events
        ]

    async def metrics(self, name: str, *, since: float, limit: int) -> list[MetricsRow]:
        status = await self._ask(GetJob(job=await self._job_id(name)), JobStatus)
        worker = next(each for each in status.workers if each.rank == 0)
        loop = asyncio.get_running_loop()
        read = partial(
            read_reports,
            self._open_connection(),
            status.job_id,
            worker.name,
            worker.incarnation,
            since=since,
            limit=limit,
        )
        try:
            kept = await asyncio.wait_for(loop.run_in_executor(self._metric_threads, read), METRICS_WITHIN_S)
        except TimeoutError:
            raise RefusedError("unavailable", f"metrics of {name} did not come in {METRICS_WITHIN_S:g} s.") from None
        if kept.missing and not kept.reports:
            raise RefusedError("unavailable", kept.missing[0])
        return [
            MetricsRow(at=at.at, step=at.step, total=at.total, metrics=at.metrics, incarnation=at.incarnation)
            for at in kept.reports
        ]

    def describe(self, plan: RunPlan) -> dict[str, Any]:
        spec = job_spec(plan, shares_host=self._shares_host)
        (role,) = spec.roles
        return {
            "name": spec.name,
            "command": " ".join(["python", "-m", role.entry_point.target, *role.entry_point.argv]),
            "nodes": spec.node_num,
            "ranks_per_node": role.per_group,
            "resources_per_rank": msgspec.to_builtins(role.resources),
            "environment": {name: "…" if name in plan.request.env else text for name, text in role.envs.items()},
            "labels": spec.labels,
            "annotations": {name: text for name, text in spec.annotations.items() if name != REQUEST_ANNOTATION},
            "max_restarts": role.role_max_restart,
            "stop_grace_s": spec.stop_grace_s,
            "notes": list(_notes(plan, self._shares_host)),
        }

    async def close(self) -> None:
        await asyncio.to_thread(self._connection.close)
        for threads in (self._threads, self._metric_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _job_id(self, name: str) -> str:
        run = await self.get(name)
        if run is None:
            raise RefusedError("not-found", f"there is no run {name!r}.")
        return run.job_id

    async def _job(self, word: str) -> JobStatus | None:
        try:
            return await self._ask(GetJob(job=word, annotations=True), JobStatus)
        except RefusedError as error:
            if error.code == "not-found":
                return None
            raise

    async def _lines(self, labels: Mapping[str, str]) -> list[JobLine]:
        return (await self._ask(ListJobs(labels=dict(labels)), JobList)).jobs

    async def _ask(self, message: ClientRequest, expected: type[A]) -> A:
        """Send a request, and wait for its answer without a thread."""
        connection = self._open_connection()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(_: PendingReply) -> None:
            loop.call_soon_threadsafe(_settle, future)

        reply = connection.send(message, when_done=done)
        try:
            await future
        except asyncio.CancelledError:
            connection.abandon(reply)
            raise
        return connection.take(reply, expected)

    def _open_connection(self) -> MasterConnection:
        """Return the connection; a new one if its socket broke."""
        if not self._connection.is_open and not self._connection.is_closed:
            self._connection.close()
            self._connection = connect_to(self.address)
        return self._connection

    async def _in_thread(self, items: Iterator[T]) -> AsyncIterator[T]:
        """Yield the items of an iterator that blocks, which is run on the threads for logs."""
        loop = asyncio.get_running_loop()
        while some := await loop.run_in_executor(self._threads, _take, items):
            for item in some:
                yield item


def job_spec(plan: RunPlan, *, shares_host: bool = False) -> JobSpec:
    """Return the job of an attempt."""
    request = plan.request
    per_node = request.gpus_per_node
    resources = Resources(
        accelerator=1,
        cpu=0 if shares_host else request.cpus_per_node / per_node,
        memory_mb=0 if shares_host else request.memory_per_node_gb * 1024 / per_node,
    )
    role = RoleSpec(
        name=ROLE,
        kind="elastic",
        entry_point=EntryPoint(kind="module", target=MODULE, argv=list(plan.arguments)),
        total=request.num_nodes * per_node,
        per_group=per_node,
        resources=resources,
        envs=dict(plan.environment),
        role_max_restart=ROLE_MAX_RESTART,
    )
    return JobSpec(
        name=plan.name,
        roles=[role],
        node_num=request.num_nodes,
        device_per_node=per_node,
        failover_exec=2,  # restart the role,
        stop_grace_s=STOP_GRACE_S,
        submitted_by=f"unified-gateway@{os.uname().nodename}:{os.getpid()}",
        labels=dict(plan.labels),
        annotations=dict(plan.annotations),
    )


def _record(found: JobStatus | JobLine) -> RunRecord:
    """Return a job as a run; without a run id if it is no job of a gateway's."""
    is_run = found.labels.get(KIND_LABEL) == KIND
    if isinstance(found, JobStatus):
        failure, annotations = found.end.failure.summary if found.end is not None else "", found.annotations
        num_restarts = max([found.num_restarts, *(role.num_restarts for role in found.roles)])
    else:
        failure, annotations, num_restarts = found.failure, {}, found.num_restarts
    state = _state(found)
    return RunRecord(
        name=found.name,
        namespace=found.labels.get(NAMESPACE_LABEL, ""),
        run_id=found.labels.get(RUN_ID_LABEL, "") if is_run else "",
        framework=found.labels.get(FRAMEWORK_LABEL, ""),
        status=state,
        job_id=found.job_id,
        detail="" if state == "succeeded" else first_line(failure or found.reason),
        submitted_at=found.submitted_at,
        started_at=found.started_at,
        ended_at=found.ended_at,
        exit_code=found.exit_code,
        num_restarts=num_restarts,
        labels=user_labels(found.labels),
        annotations=annotations,
    )


def _state(found: JobStatus | JobLine) -> RunState:
    if found.stage is Stage.STOPPED:
        return "succeeded" if found.exit_code == 0 else "failed"
    return "submitted" if found.started_at is None else "running"


def _notes(plan: RunPlan, shares_host: bool) -> Iterator[str]:
    if plan.request.image is not None:
        yield "image is not used: workers run in the environment of their agents."
    if shares_host:
        yield "cpus_per_node and memory_per_node_gb are not used: the cluster is this host."


def _take(items: Iterator[T]) -> list[T]:
    return list(itertools.islice(items, LINES_AT_ONCE))


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
