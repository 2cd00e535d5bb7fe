"""The interface of a cluster that runs the jobs of the gateway: our own master, or Kubeflow.

Rules about runs (one job per run id, resume, conflicts) are in `runs.py`, the same for each backend. Names of jobs are
unique within one backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from unified.client.reports import KeptReports
from unified.errors import RefusedError
from unified.training.options import TrainingOptions
from unified_gateway.schemas import RunState, TrainingRequest

KIND_LABEL, KIND = "unified/kind", "training"
FRAMEWORK_LABEL = "unified/framework"
RUN_ID_LABEL = "unified/run-id"
NAMESPACE_LABEL = "unified/namespace"
REQUEST_ANNOTATION = "unified/request"
"""The submitted payload as canonical JSON, with a salted digest in place of each value of `env`."""
ATTEMPT_ANNOTATION = "unified/attempt-id"


class NameTakenError(RefusedError):
    """Another job, unknown to the submitter, has this name or run id: look again."""

    def __init__(self, reason: str) -> None:
        super().__init__("name-taken", reason)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One attempt at a run, independent of the backend."""

    request: TrainingRequest
    name: str
    """Name of the job: a DNS label of at most 52 characters."""
    options: TrainingOptions
    """Options of the training program. A restart of its workers has the same `attempt_id`, a resume another."""
    environment: Mapping[str, str]
    """Variables of the payload's `env`."""
    labels: Mapping[str, str]
    """The payload's labels and the gateway's own. ``unified/run-id`` may be longer than Kubernetes allows."""
    annotations: Mapping[str, str]
    kept_env: tuple[str, ...] = ()
    """Variables whose values are not known here: the job that this attempt follows has them."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    name: str
    namespace: str
    run_id: str
    framework: str
    status: RunState
    job_id: str
    """Id of the attempt: the job's id at the master, the object's uid in Kubernetes."""
    detail: str = ""
    """One line: why it waits, or why it failed."""
    submitted_at: float | None = None
    """Seconds since 1970, as all times here."""
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    num_restarts: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Empty in lists; `get` returns them."""

    @property
    def is_ended(self) -> bool:
        return self.status in ("failed", "succeeded")


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """One decision about a run."""

    at: float
    event: str
    reason: str
    worker: str = ""
    node: str = ""


class TrainingBackend(Protocol):
    """A cluster that runs training jobs.

    Errors of all calls: `MasterUnreachableError` when the cluster does not answer (HTTP 503), `RefusedError` when it
    refuses (its code decides: ``not-found`` 404, ``name-taken`` 409, ``bad-request`` 422, ``unavailable`` 503, …),
    `UsageError` for a request that this backend cannot carry out (422).
    """

    name: str
    """Value of ``--backend``: ``master`` or ``kubeflow``."""
    default_namespace: str

    async def submit(self, plan: RunPlan, *, follows: str) -> str:
        """Start an attempt; return its job id.

        Args:
            follows: job id of the ended job of this name that this attempt replaces; empty if there is none.

        Raises:
            NameTakenError: a job of this name or run id has not ended, or the newest job of this name is not `follows`.
                The cluster decides this atomically, so one of concurrent submissions wins.
        """
        ...

    async def get(self, name: str) -> RunRecord | None:
        """Return the newest attempt of this name, read from the cluster now; None if none is known."""
        ...

    async def find_run(self, run_id: str) -> RunRecord | None:
        """Return the newest attempt of this run id, under any name; None if none is known."""
        ...

    async def runs(self) -> list[RunRecord]:
        """Return all known attempts of training runs, newest first. The gateway asks at most once a second."""
        ...

    async def stop(self, name: str, *, force: bool) -> None:
        """Stop a run in order, or at once with `force`. An ended run stays as it is."""
        ...

    def logs(self, name: str, *, rank: int | None, follow: bool, tail_bytes: int | None) -> AsyncIterator[str]:
        """Yield the lines that a run printed; with `follow`, until it has ended and all was read.

        Args:
            rank: the only rank to read; None for all.
            tail_bytes: begin this far before the end of each rank's output; None: at its beginning.
        """
        ...

    async def events(self, name: str, *, limit: int) -> list[RunEvent]:
        """Return the newest decisions about a run, oldest first."""
        ...

    async def metrics(self, name: str, *, since: float, limit: int) -> KeptReports:
        """Return the newest points that rank 0 reported after `since`, oldest first."""
        ...

    def describe(self, plan: RunPlan) -> dict[str, Any]:
        """Return the job that `submit` would create, for ``dry_run``. Values of `env` are left out."""
        ...

    async def close(self) -> None:
        """End the connection; calls that wait for an answer fail."""
        ...
