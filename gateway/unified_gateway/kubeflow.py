"""Training runs as `PyTorchJob` objects of a Kubernetes cluster that has the Kubeflow Training Operator.

The objects are the only state: their labels and annotations hold the run id and the payload. A name is one object, so
the API server lets one of concurrent submissions win. If a run id has two names, the older object wins. Stopping a run
deletes its object: afterwards, only the run's store knows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from unified.client.reports import KeptReports
from unified.errors import RefusedError, UsageError
from unified_gateway.backend import (
    RUN_ID_LABEL,
    NameTakenError,
    RunEvent,
    RunPlan,
    RunRecord,
)
from unified_gateway.kubernetes import manifest
from unified_gateway.kubernetes.api_server import KubernetesApi, configured
from unified_gateway.kubernetes.conditions import (
    JOB_LABEL,
    Json,
    event_of,
    failed_pod,
    node_of,
    record_of,
    with_pods,
)
from unified_gateway.kubernetes.pod_logs import PodLogs
from unified_gateway.plan import StoredRequest

GONE_S = 60.0
"""Seconds to wait until the earlier object of a resumed run is gone."""
LOOK_S = 0.25
MAX_EVENT_PODS = 16
BYTES_PER_LINE = 100
"""Average bytes of a log line: Kubernetes counts the end of a log in lines."""
REASON_LINES = 400
"""Last lines of a failed pod's log that are searched for the reason."""
_MAX_REASONS = 1000


class KubeflowBackend:
    """A Kubernetes cluster as `TrainingBackend`.

    Args:
        namespaces: namespaces of runs; the first is the default.
        options: None: read from the environment.
        api: None: the cluster of this pod's ServiceAccount, or of the kubeconfig.
    """

    name = "kubeflow"

    def __init__(
        self,
        *,
        namespaces: Sequence[str] = ("default",),
        options: manifest.KubeflowOptions | None = None,
        api: KubernetesApi | None = None,
    ) -> None:
        self.default_namespace = namespaces[0]
        self._namespaces = tuple(namespaces)
        self._options = manifest.KubeflowOptions.read(os.environ) if options is None else options
        self._api = KubernetesApi(configured()) if api is None else api
        self._logs = PodLogs(self._api)
        self._reasons: dict[str, RunRecord] = {}
        """Records of failed runs, by job id, so that their pods are read only once."""

    async def submit(self, plan: RunPlan, *, follows: str) -> str:
        namespace = self._namespace(plan)
        earlier = await self._object(plan.name)
        if earlier is not None:
            run = _record(earlier)
            if run.job_id != follows or not run.is_ended:
                raise NameTakenError(f"{plan.name} in {run.namespace} is there already ({run.status}).")
        if plan.kept_env:
            plan = _with_kept(plan, earlier)
        body = manifest.pytorch_job(plan, namespace, self._options)
        if rivals := await self._living(plan):
            raise NameTakenError(f"run {plan.request.run_id} goes on as {rivals[0].name}.")
        if earlier is not None:
            await self._remove(_record(earlier))
        created = _record(await self._api.create_job(namespace, body))
        # A job of another name with this run id may be created at the same time; by now both can be seen.
        for rival in await self._living(plan):
            if (rival.submitted_at or 0.0, rival.job_id) < (created.submitted_at or 0.0, created.job_id):
                await self._api.delete_job(namespace, created.name, created.job_id)
                raise NameTakenError(f"run {plan.request.run_id} goes on as {rival.name}.")
        return created.job_id

    async def get(self, name: str) -> RunRecord | None:
        found = await self._object(name)
        if found is None:
            return None
        return await self._with_pods(_record(found))

    async def find_run(self, run_id: str) -> RunRecord | None:
        newest = max(await self._of_run(run_id), key=_age, default=None)
        return None if newest is None else await self._with_pods(newest)

    async def runs(self) -> list[RunRecord]:
        found = await asyncio.gather(*(self._runs_in(namespace) for namespace in self._namespaces))
        return sorted((run for runs in found for run in runs), key=_age, reverse=True)

    async def stop(self, name: str, *, force: bool) -> None:
        if force:
            raise UsageError(
                "force is not for the kubeflow backend: a pod that does not end is removed with `kubectl delete pod "
                "--grace-period=0 --force`."
            )
        found = await self._object(name)
        if found is not None and not (run := _record(found)).is_ended:
            await self._api.delete_job(run.namespace, run.name, run.job_id)

    async def logs(self, name: str, *, rank: int | None, follow: bool, tail_bytes: int | None) -> AsyncIterator[str]:
        run = await self._known(name)
        pods = await self._pods(run)
        stored = StoredRequest.read(run.annotations)
        per_node = stored.fields.get("gpus_per_node", 1) if stored is not None else 1
        node = None if rank is None else rank // per_node
        if run.is_ended and not any(node in (None, node_of(pod)) for pod in pods):
            kept = _logs_uri(stored, run)
            raise RefusedError("not-found", f"the pods of {name} are gone; what its ranks printed is below {kept}.")

        async def look() -> tuple[list[Json], bool]:
            found = await self._api.job(run.namespace, name)
            is_over = found is None or _record(found).job_id != run.job_id or _record(found).is_ended
            return await self._pods(run), is_over

        tail_lines = None if tail_bytes is None else max(1, tail_bytes // BYTES_PER_LINE)
        lines = self._logs.read(look, node=node, follow=follow, tail_lines=tail_lines)
        try:
            async for line in lines:
                yield line
        finally:
            await lines.aclose()

    async def events(self, name: str, *, limit: int) -> list[RunEvent]:
        run = await self._known(name)
        pods = [pod["metadata"]["name"] for pod in sorted(await self._pods(run), key=node_of)[:MAX_EVENT_PODS]]
        found = await asyncio.gather(*(self._api.events(run.namespace, each) for each in [name, *pods]))
        events = [event_of(event, name) for events in found for event in events]
        return sorted(events, key=lambda event: event.at)[-limit:]

    async def metrics(self, name: str, *, since: float, limit: int) -> KeptReports:
        run = await self._known(name)
        kept = _logs_uri(StoredRequest.read(run.annotations), run)
        raise UsageError(f"the kubeflow backend keeps no metrics: they are in the logs of {name}, below {kept}.")

    def describe(self, plan: RunPlan) -> dict[str, Any]:
        body = manifest.pytorch_job(plan, self._namespace(plan), self._options)
        return manifest.shown(body, frozenset(plan.request.env))

    async def close(self) -> None:
        self._logs.close()
        self._api.close()

    def _namespace(self, plan: RunPlan) -> str:
        namespace = plan.request.namespace or self.default_namespace
        if namespace not in self._namespaces:
            known = ", ".join(self._namespaces)
            raise UsageError(f"namespace: this service does not use {namespace!r}; it uses {known}.")
        return namespace

    async def _object(self, name: str) -> Json | None:
        found = await asyncio.gather(*(self._api.job(namespace, name) for namespace in self._namespaces))
        return next((each for each in found if each is not None), None)

    async def _known(self, name: str) -> RunRecord:
        found = await self._object(name)
        if found is None:
            raise RefusedError("not-found", f"there is no run {name!r}.")
        return _record(found)

    async def _pods(self, run: RunRecord) -> list[Json]:
        pods = await self._api.pods(run.namespace, f"{JOB_LABEL}={run.name}")
        return [pod for pod in pods if _owner(pod) in ("", run.job_id)]

    async def _of_run(self, run_id: str) -> list[RunRecord]:
        selector = f"{manifest.KIND_SELECTOR},{RUN_ID_LABEL}={manifest.label_value(run_id)}"
        found = await asyncio.gather(*(self._api.jobs(namespace, selector) for namespace in self._namespaces))
        runs = [_record(each) for jobs in found for each in jobs]
        return [run for run in runs if run.run_id == run_id]

    async def _living(self, plan: RunPlan) -> list[RunRecord]:
        """Return the runs of this run id, under other names, that have not ended."""
        runs = await self._of_run(plan.request.run_id)
        return [run for run in runs if run.name != plan.name and not run.is_ended]

    async def _runs_in(self, namespace: str) -> list[RunRecord]:
        runs = [_record(each) for each in await self._api.jobs(namespace, manifest.KIND_SELECTOR)]
        pending: dict[str, list[Json]] = {}
        if any(run.status == "submitted" for run in runs):
            for pod in await self._api.pods(namespace, manifest.KIND_SELECTOR, field_selector="status.phase=Pending"):
                pending.setdefault((pod["metadata"].get("labels") or {}).get(JOB_LABEL, ""), []).append(pod)
        known = [with_pods(run, pending.get(run.name, ())) if run.status == "submitted" else run for run in runs]
        complete = [await self._with_pods(run) if run.status == "failed" else run for run in known]
        return [replace(run, annotations={}) for run in complete]

    async def _with_pods(self, run: RunRecord) -> RunRecord:
        """Return the record with facts from its pods. The reason of a failure is searched only once."""
        if run.job_id in self._reasons and run.status == "failed":
            return self._reasons[run.job_id]
        pods = await self._pods(run)
        if run.status != "failed":
            return with_pods(run, pods)
        log = ""
        if (pod := failed_pod(pods)) is not None:
            with contextlib.suppress(RefusedError):
                log = await self._api.log_tail(run.namespace, pod["metadata"]["name"], manifest.CONTAINER, REASON_LINES)
        if len(self._reasons) >= _MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[run.job_id] = with_pods(run, pods, log)
        return self._reasons[run.job_id]

    async def _remove(self, run: RunRecord) -> None:
        """Delete the object of a run that has ended, and wait until its name is free."""
        await self._api.delete_job(run.namespace, run.name, run.job_id)
        deadline = time.monotonic() + GONE_S
        while (found := await self._api.job(run.namespace, run.name)) is not None:
            if found["metadata"]["uid"] != run.job_id:
                raise NameTakenError(f"{run.name} in {run.namespace} is there already.")
            if time.monotonic() > deadline:
                text = f"{run.name} in {run.namespace} has not been removed within {GONE_S:g} s: try again later."
                raise RefusedError("unavailable", text)
            await asyncio.sleep(LOOK_S)


def _record(job: Json) -> RunRecord:
    return record_of(job, now=time.time())


def _age(run: RunRecord) -> tuple[float, str]:
    return (run.submitted_at or 0.0, run.job_id)


def _owner(pod: Json) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((each["uid"] for each in owners if each.get("controller")), "")


def _with_kept(plan: RunPlan, earlier: Json | None) -> RunPlan:
    """Return the plan with the kept variables, whose values the earlier object has."""
    known = {} if earlier is None else manifest.environment_of(earlier)
    if missing := [name for name in plan.kept_env if name not in known]:
        raise UsageError(f"env: the values of {', '.join(missing)} are not known any more: give them again.")
    kept = {name: known[name] for name in plan.kept_env}
    return replace(plan, environment={**kept, **plan.environment})


def _logs_uri(stored: StoredRequest | None, run: RunRecord) -> str:
    base = stored.fields.get("checkpoint_base_uri", "") if stored is not None else ""
    return f"{base or 'its checkpoint_base_uri'}/{run.run_id}/framework={run.framework}/logs"
