"""Training runs as jobs of our own master: one elastic role of ``python -m unified.training``."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from unified.client.logs import LogFilter, LogReader, Mode
from unified.client.report import first_line
from unified.client.reports import KeptReports, read_reports
from unified.errors import MasterUnreachableError, RefusedError
from unified.job import payload
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
from unified.protocol import client_master
from unified.protocol.records import Stage
from unified_gateway import backend
from unified_gateway.master_client import MasterClient
from unified_gateway.plan import user_labels
from unified_gateway.schemas import RunState

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
"""Seconds without an answer of the master after which a reader of logs gives up."""
T = TypeVar("T")


class MasterBackend:
    """A master as `TrainingBackend`.

    Args:
        address: ``tcp://HOST:PORT``.
        shares_host: the cluster is this host alone: only devices decide the placement of runs, and the CPUs and memory
            that they ask for are ignored.
    """

    name = "master"
    default_namespace = "default"

    def __init__(self, address: str, *, shares_host: bool = False) -> None:
        self._master = MasterClient(address)
        self._shares_host = shares_host
        self._threads = ThreadPoolExecutor(NUM_LOG_THREADS, thread_name_prefix="unified-gateway-logs")
        self._metric_threads = ThreadPoolExecutor(NUM_METRIC_THREADS, thread_name_prefix="unified-gateway-metrics")

    async def submit(self, plan: backend.RunPlan, *, follows: str) -> str:
        spec = job_spec(plan, shares_host=self._shares_host)
        request = client_master.SubmitJob(
            spec=spec, follows=follows, kept_env=list(plan.kept_env), unique_labels=[backend.RUN_ID_LABEL]
        )
        try:
            return (await self._master.ask(request, client_master.Accepted)).job_id
        except RefusedError as error:
            if error.code == "name-taken":
                raise backend.NameTakenError(error.reason) from None
            raise

    async def get(self, name: str) -> backend.RunRecord | None:
        found = await self._job(name)
        if found is not None and found.name != name:  # `name` is the id of a job with another name
            return await self._newest(line for line in await self._lines({}) if line.name == name)
        return None if found is None else _record(found)

    async def find_run(self, run_id: str) -> backend.RunRecord | None:
        return await self._newest(await self._lines({backend.KIND_LABEL: backend.KIND, backend.RUN_ID_LABEL: run_id}))

    async def runs(self) -> list[backend.RunRecord]:
        lines = await self._lines({backend.KIND_LABEL: backend.KIND})
        return [_record(line) for line in sorted(lines, key=lambda line: (-line.submitted_at, line.job_id))]

    async def stop(self, name: str, *, force: bool) -> None:
        run = await self.get(name)
        if run is not None and not run.is_ended:
            await self._master.ask(
                client_master.StopJob(job=run.job_id, force=force, reason="asked through the training API"),
                client_master.Done,
            )

    async def logs(self, name: str, *, rank: int | None, follow: bool, tail_bytes: int | None) -> AsyncIterator[str]:
        job_id = await self._job_id(name)
        wanted = LogFilter(ROLE, rank)
        mode: Mode = "live" if follow else "once"
        reader = LogReader(self._master.connection, job_id, wanted, mode=mode, tail_bytes=tail_bytes)
        seen_at = status_at = time.monotonic()
        status: client_master.JobStatus | None = await self._master.ask(
            client_master.GetJob(job=job_id), client_master.JobStatus
        )
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
                    status = await self._master.ask(client_master.GetJob(job=job_id), client_master.JobStatus)
                    seen_at = time.monotonic()
                except MasterUnreachableError:
                    if time.monotonic() - seen_at > MASTER_GRACE_S:
                        raise

    async def events(self, name: str, *, limit: int) -> list[backend.RunEvent]:
        story = await self._master.ask(
            client_master.Explain(job=await self._job_id(name), limit=limit), client_master.Story
        )
        return [
            backend.RunEvent(at=each.at, event=each.event, reason=each.reason, worker=each.worker, node=each.node)
            for each in story.events
        ]

    async def metrics(self, name: str, *, since: float, limit: int) -> KeptReports:
        status = await self._master.ask(client_master.GetJob(job=await self._job_id(name)), client_master.JobStatus)
        worker = next(each for each in status.workers if each.rank == 0)
        loop = asyncio.get_running_loop()
        read = partial(
            read_reports,
            self._master.connection,
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
        return kept

    def describe(self, plan: backend.RunPlan) -> dict[str, Any]:
        spec = job_spec(plan, shares_host=self._shares_host)
        (role,) = spec.roles
        return {
            "name": spec.name,
            "command": f"python -m {role.entry_point.target}",
            "nodes": spec.node_num,
            "ranks_per_node": role.per_group,
            "resources_per_rank": msgspec.to_builtins(role.resources),
            "environment": {name: "…" if name in plan.request.env else text for name, text in role.envs.items()},
            "config": plan.options.as_job_config(),
            "labels": spec.labels,
            "annotations": {
                name: text for name, text in spec.annotations.items() if name != backend.REQUEST_ANNOTATION
            },
            "max_restarts": role.role_max_restart,
            "stop_grace_s": spec.stop_grace_s,
            "notes": list(_notes(plan, self._shares_host)),
        }

    async def close(self) -> None:
        await self._master.close()
        for threads in (self._threads, self._metric_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _job_id(self, name: str) -> str:
        run = await self.get(name)
        if run is None:
            raise RefusedError("not-found", f"there is no run {name!r}.")
        return run.job_id

    async def _job(self, word: str) -> client_master.JobStatus | None:
        try:
            return await self._master.ask(client_master.GetJob(job=word, annotations=True), client_master.JobStatus)
        except RefusedError as error:
            if error.code == "not-found":
                return None
            raise

    async def _newest(self, lines: Iterable[client_master.JobLine]) -> backend.RunRecord | None:
        newest = max(lines, key=lambda line: line.submitted_at, default=None)
        found = None if newest is None else await self._job(newest.job_id)
        return None if found is None else _record(found)

    async def _lines(self, labels: Mapping[str, str]) -> list[client_master.JobLine]:
        return (await self._master.ask(client_master.ListJobs(labels=dict(labels)), client_master.JobList)).jobs

    async def _in_thread(self, items: Iterator[T]) -> AsyncIterator[T]:
        """Yield the items of a blocking iterator, which runs on the threads for logs."""
        loop = asyncio.get_running_loop()
        while some := await loop.run_in_executor(self._threads, _take, items):
            for item in some:
                yield item


def job_spec(plan: backend.RunPlan, *, shares_host: bool = False) -> JobSpec:
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
        entry_point=EntryPoint(kind="module", target=MODULE),
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
        user_config=payload.encode(plan.options.as_job_config()),
        failover_exec=2,  # restart the role
        stop_grace_s=STOP_GRACE_S,
        submitted_by=f"unified-gateway@{os.uname().nodename}:{os.getpid()}",
        labels=dict(plan.labels),
        annotations=dict(plan.annotations),
    )


def _record(found: client_master.JobStatus | client_master.JobLine) -> backend.RunRecord:
    """Return a job as a run; without a run id if no gateway submitted it."""
    is_run = found.labels.get(backend.KIND_LABEL) == backend.KIND
    if isinstance(found, client_master.JobStatus):
        failure, annotations = found.end.failure.summary if found.end is not None else "", found.annotations
        num_restarts = max([found.num_restarts, *(role.num_restarts for role in found.roles)])
    else:
        failure, annotations, num_restarts = found.failure, {}, found.num_restarts
    state = _state(found)
    return backend.RunRecord(
        name=found.name,
        namespace=found.labels.get(backend.NAMESPACE_LABEL, ""),
        run_id=found.labels.get(backend.RUN_ID_LABEL, "") if is_run else "",
        framework=found.labels.get(backend.FRAMEWORK_LABEL, ""),
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


def _state(found: client_master.JobStatus | client_master.JobLine) -> RunState:
    if found.stage is Stage.STOPPED:
        return "succeeded" if found.exit_code == 0 else "failed"
    return "submitted" if found.started_at is None else "running"


def _notes(plan: backend.RunPlan, shares_host: bool) -> Iterator[str]:
    if plan.request.image is not None:
        yield "image is not used: workers run in the environment of their agents."
    if shares_host:
        yield "cpus_per_node and memory_per_node_gb are not used: the cluster is this host."


def _take(items: Iterator[T]) -> list[T]:
    return list(itertools.islice(items, LINES_AT_ONCE))
