"""A job's status boiled down to one line a role. Pure: records in, words out."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from unified.protocol.client_master import JobStatus, RoleStatus, WorkerStatus
from unified.protocol.records import Progress, Stage, WorkerState

UNSTARTED = "UNSTARTED"


class RoleSummary(NamedTuple):
    """What a person wants to know of a role at a glance."""

    name: str
    states: str
    """``2 RUNNING`` or ``1 RUNNING, 1 STARTING``."""
    round: int
    """0 for a role that is not elastic, or before its first round."""
    num_restarts: int
    step: int | None
    total: int | None
    metrics: str
    """``loss 2.31  lr 0.0003``."""

    @property
    def step_text(self) -> str:
        """``step 340/2000``, ``step 340`` or nothing."""
        if self.step is None:
            return ""
        return f"step {self.step}/{self.total}" if self.total else f"step {self.step}"

    @property
    def progress(self) -> tuple[str, str]:
        """What its workers reported."""
        return (self.step_text, self.metrics)

    @property
    def text(self) -> str:
        """All of it in one line."""
        parts = [
            self.states,
            f"round {self.round}" if self.round else "",
            self.step_text,
            self.metrics,
            restarts_text(self.num_restarts),
        ]
        return f"{self.name}: " + ", ".join(part for part in parts if part)


def summarise(status: JobStatus) -> list[RoleSummary]:
    """One summary a role, in the order of the job's description."""
    return [_summarise_role(status, role) for role in status.roles]


def _summarise_role(status: JobStatus, role: RoleStatus) -> RoleSummary:
    workers = [worker for worker in status.workers if worker.role == role.name]
    reported = (w.progress for w in sorted(workers, key=lambda w: w.rank) if w.progress is not None)
    progress = next((each for each in reported if each.step is not None or each.metrics), Progress())
    return RoleSummary(
        name=role.name,
        states=_states_text(status, workers) or f"{role.total} {WorkerState.PENDING}",
        round=role.round,
        num_restarts=role.num_restarts,
        step=progress.step,
        total=progress.total,
        metrics="  ".join(f"{name} {number_text(value)}" for name, value in progress.metrics.items()),
    )


def state_text(status: JobStatus, worker: WorkerStatus) -> str:
    """The worker's state; ``UNSTARTED`` if its job ended before it began."""
    is_over = status.stage in (Stage.STOPPING, Stage.STOPPED)
    return UNSTARTED if is_over and worker.state is WorkerState.PENDING else worker.state.value


def _states_text(status: JobStatus, workers: list[WorkerStatus]) -> str:
    """How many workers are in each state, in the order of a worker's life."""
    counts = Counter(state_text(status, worker) for worker in workers)
    return ", ".join(f"{counts[state]} {state}" for state in (UNSTARTED, *WorkerState) if counts[state])


def short_name(worker: WorkerStatus) -> str:
    """``trainer-0``."""
    return f"{worker.role}-{worker.rank}"


def restarts_text(count: int) -> str:
    """``1 restart``, ``2 restarts``, or nothing."""
    return f"{count} restart{'s' if count != 1 else ''}" if count else ""


def number_text(value: float | int | str) -> str:
    """A metric as a person reads it: four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration_text(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size_text(num_bytes: int) -> str:
    """``512 bytes``, ``95 MB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
