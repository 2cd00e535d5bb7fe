"""State of a run from a `PyTorchJob`, as the API server has it, and from its pods. Pure.

The operator's own message about a failure says how many replicas failed. The reason is in the pods: in the last lines
that a container printed, or in what keeps it from starting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from unified_gateway.backend import FRAMEWORK_LABEL, KIND, KIND_LABEL, RUN_ID_LABEL, RunEvent, RunRecord
from unified_gateway.kubernetes.manifest import CONTAINER
from unified_gateway.plan import user_labels
from unified_gateway.schemas import RunState

Json = Mapping[str, Any]
JOB_LABEL = "training.kubeflow.org/job-name"
_TYPE_LABEL, _INDEX_LABEL = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
_STATES: tuple[tuple[str, RunState], ...] = (
    ("Succeeded", "succeeded"),
    ("Failed", "failed"),
    ("Suspended", "submitted"),
    ("Restarting", "running"),
    ("Running", "running"),
)
"""Conditions by priority: the first one that holds decides."""
_UNCLAIMED_S = 30.0
_MAX_DETAIL = 500
_BEGIN = "unified-train: run "
_OWN_LINE = re.compile(r"unified-train: (?!run |stopped ).*")
_RANK_LINE = re.compile(r"\w+(Error|Exception)\b.*")
_OF_TORCHRUN = ("ChildFailedError", "SignalException")


def record_of(job: Json, *, now: float) -> RunRecord:
    """Return the run of an object; without a run id if no gateway created the object."""
    metadata, status = job["metadata"], job.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    labels = {name: annotations.get(name, value) for name, value in labels.items()}  # whole, if too long for a label
    holding = {each["type"]: each for each in status.get("conditions") or () if each.get("status") == "True"}
    name, state = next(((name, state) for name, state in _STATES if name in holding), ("Created", "submitted"))
    condition = holding.get(name, {})
    is_ended = state in ("succeeded", "failed")
    submitted_at = seconds(metadata.get("creationTimestamp"))
    running: Json = next((each for each in status.get("conditions") or () if each["type"] == "Running"), {})
    detail = one_line(condition.get("message", "")) if name in ("Failed", "Suspended", "Restarting") else ""
    if not holding and submitted_at is not None and now - submitted_at > _UNCLAIMED_S:
        detail = "no operator has taken it up: is the Kubeflow Training Operator running?"
    if metadata.get("deletionTimestamp") and not is_ended:
        state, detail = "running", "it is being stopped"
    return RunRecord(
        name=metadata["name"],
        namespace=metadata["namespace"],
        run_id=labels.get(RUN_ID_LABEL, "") if labels.get(KIND_LABEL) == KIND else "",
        framework=labels.get(FRAMEWORK_LABEL, ""),
        status=state,
        job_id=metadata["uid"],
        detail=detail,
        submitted_at=submitted_at,
        started_at=seconds(running.get("lastTransitionTime")),
        ended_at=seconds(status.get("completionTime") or condition.get("lastTransitionTime")) if is_ended else None,
        exit_code=0 if state == "succeeded" else None,
        labels=user_labels(labels),
        annotations=annotations,
    )


def failed_pod(pods: Sequence[Json]) -> Json | None:
    failed = [pod for pod in pods if _ended(pod).get("exitCode", 0) != 0]
    return min(failed, key=lambda pod: (seconds(_ended(pod).get("finishedAt")) or 0.0, node_of(pod)), default=None)


def with_pods(record: RunRecord, pods: Sequence[Json], log: str = "") -> RunRecord:
    """Return the record with facts from its pods: the reason of a failure or a wait, and the restarts.

    Args:
        log: the last lines of `failed_pod`. The message that Kubernetes keeps may hold nothing but torchrun's table.
    """
    restarts = sum(_container(pod).get("restartCount", 0) for pod in pods)
    if record.status == "failed" and (pod := failed_pod(pods)) is not None:
        ended = _ended(pod)
        detail = one_line(f"{pod_name(pod)}: {_reason(ended, log or ended.get('message') or '')}")
        return replace(record, detail=detail, exit_code=ended["exitCode"], num_restarts=restarts)
    if record.status == "submitted" and (waits := [text for pod in pods if (text := _wait(pod))]):
        return replace(record, detail=one_line(waits[0]), num_restarts=restarts)
    return replace(record, num_restarts=restarts)


def pod_name(pod: Json) -> str:
    """Return ``master-0``, ``worker-3``: the pod's name without its job's."""
    labels = pod["metadata"].get("labels") or {}
    return f"{labels.get(_TYPE_LABEL, '')}-{labels.get(_INDEX_LABEL, '')}"


def node_of(pod: Json) -> int:
    """Return the index of a pod among the run's nodes, from 0."""
    labels = pod["metadata"].get("labels") or {}
    return int(labels.get(_INDEX_LABEL) or 0) + (labels.get(_TYPE_LABEL) != "master")


def incarnation_of(pod: Json) -> tuple[str, int] | None:
    """Return the pod's uid and its container's number of restarts; None if it has not started."""
    container = _container(pod)
    has_started = any(name in (container.get("state") or {}) for name in ("running", "terminated"))
    return (pod["metadata"]["uid"], container.get("restartCount", 0)) if has_started else None


def event_of(event: Json, job: str) -> RunEvent:
    about = (event.get("involvedObject") or {}).get("name", "")
    at = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return RunEvent(
        at=seconds(at) or 0.0,
        event=event.get("reason") or "",
        reason=one_line(event.get("message") or ""),
        worker=about.removeprefix(f"{job}-") if about != job else "",
        node=(event.get("source") or {}).get("host") or "",
    )


def seconds(time: str | None) -> float | None:
    """Return a time of Kubernetes in seconds since 1970."""
    return None if time is None else datetime.fromisoformat(time).timestamp()


def one_line(text: str) -> str:
    """Return a message as one line of a bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_DETAIL else f"{line[: _MAX_DETAIL - 1]}…"


def _container(pod: Json) -> Json:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((each for each in statuses if each["name"] == CONTAINER), {})


def _ended(pod: Json) -> Json:
    container = _container(pod)
    states = (container.get(name) or {} for name in ("state", "lastState"))
    return next((state["terminated"] for state in states if state.get("terminated")), {})


def _reason(ended: Json, printed: str) -> str:
    """Return why a container ended: our program's line, else the line of a rank's error, else the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip(" =-\t")]
    begin = max((number for number, line in enumerate(lines) if _BEGIN in line), default=0)
    for pattern in (_OWN_LINE, _RANK_LINE):
        for line in lines[begin:]:  # of the last start
            if (match := pattern.search(line)) and not any(name in line for name in _OF_TORCHRUN):
                return match[0]
    code, reason = ended["exitCode"], ended.get("reason") or "Error"
    how = f"exit code {code}" if reason == "Error" else f"{reason}, exit code {code}"
    return f"{lines[-1]} ({how})" if lines else f"it ended with {how}"


def _wait(pod: Json) -> str:
    """Return why a pod does not run: no node has room for it, or its container cannot be made."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{pod_name(pod)}: {condition.get('message') or condition.get('reason') or 'not scheduled'}"
    waiting = (_container(pod).get("state") or {}).get("waiting") or {}
    if (reason := waiting.get("reason", "")) in ("", "ContainerCreating", "PodInitializing"):
        return ""
    return f"{pod_name(pod)}: {reason}: {waiting.get('message') or 'its container cannot be started'}"
