"""Rules about runs, for all backends: one job per run id, resume, conflicts; and a cache of all runs.

The `run_id` identifies a run. A repeated payload finds the job that it made before. Another payload with the same run
id is a conflict, unless it resumes an ended run. The cluster lets one of concurrent submissions win
(`TrainingBackend.submit`), and the others find its run: no lock is held here, and any number of gateways may serve.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from unified.errors import MasterUnreachableError, RefusedError, UsageError
from unified_gateway.backend import ATTEMPT_ANNOTATION, NameTakenError, RunPlan, RunRecord, TrainingBackend
from unified_gateway.http.limits import TokenBucket
from unified_gateway.plan import NEEDED_TO_RESUME, RESUME, Difference, StoredRequest, job_name, plan_run
from unified_gateway.schemas import ResumeRequest, TrainingRequest

MAX_AGE_S = 1.0
"""Age at which the list of runs is read again."""
MAX_TRIES = 5
"""Tries of a submission: each time another one may come between the lookup and the submission."""
LIST_WITHIN_S = 5.0
"""Seconds within which the cluster has to list its runs; less than Prometheus waits for a scrape."""
MISSES_PER_S, MISSES_BURST = 100.0, 200.0
"""Limit of requests about single runs that the list lacks; further callers wait for the next list."""


class RunNotFoundError(RefusedError):
    """No run of this name is known."""

    def __init__(self, name: str) -> None:
        super().__init__("not-found", f"there is no run {name!r}. GET /train lists those that are known.")


class RunConflictError(RefusedError):
    """The run id or the name belongs to another run, or to one that goes on.

    Attributes:
        run: the run in the way.
        differences: fields in which the payloads differ.
    """

    def __init__(self, reason: str, run: RunRecord, differences: Mapping[str, Difference] | None = None) -> None:
        super().__init__("conflict", reason)
        self.run = run
        self.differences = dict(differences or {})


class SubmitOutcome(NamedTuple):
    """Result of a submission: a run, and whether it is a new attempt."""

    run: RunRecord
    is_new: bool


class Decision(NamedTuple):
    """Action on a payload: begin an attempt that follows a job (empty: the first), or return the existing run."""

    action: Literal["begin", "return"]
    follows: str = ""


def decide(request: TrainingRequest, run: RunRecord | None, named: RunRecord | None) -> Decision:
    """Decide about a payload.

    Args:
        run: newest attempt of its run id.
        named: newest job of its name, of any run.

    Raises:
        RunConflictError: the payload conflicts with one of them.
    """
    follows = named.job_id if named is not None else ""
    stored = StoredRequest.read(run.annotations) if run is not None else None
    if run is None or stored is None or run.run_id != request.run_id:
        if named is None or named.is_ended:
            return Decision("begin", follows)
        raise RunConflictError(f"another job, {named.job_id}, has the name {named.name} and has not ended.", named)
    differences = stored.differences(request)
    different = f"different: {', '.join(differences)}."
    if not run.is_ended:
        if differences:
            reason = f"run {request.run_id} goes on as {run.name} with another payload; {different}"
            raise RunConflictError(reason, run, differences)
        return Decision("return")
    if not differences:
        is_again = run.status == "failed" and request.resume_from_checkpoint
        return Decision("begin", follows) if is_again else Decision("return")
    if not request.resume_from_checkpoint:
        reason = (
            f"run {request.run_id} has ended as {run.name} with another payload; {different} Choose another "
            f"run_id, or set {RESUME} to go on from its checkpoints."
        )
        raise RunConflictError(reason, run, differences)
    if others := [each for each in NEEDED_TO_RESUME if each in differences]:
        reason = f"run {request.run_id} cannot be resumed with another {', '.join(others)}: choose another run_id."
        raise RunConflictError(reason, run, differences)
    return Decision("begin", follows)


class RunService:
    """Submits, resumes and stops runs on one backend, and knows the state of all of them.

    Args:
        new_id: makes unique ids of attempts and salts.
    """

    def __init__(self, backend: TrainingBackend, *, new_id: Callable[[], str] = lambda: secrets.token_hex(8)) -> None:
        self.backend = backend
        self.cache = RunCache(backend)
        self._new_id = new_id

    def plan(self, request: TrainingRequest) -> RunPlan:
        """Return what `submit` would begin."""
        namespace = self.backend.default_namespace
        return plan_run(request, attempt_id=self._new_id(), salt=self._new_id(), namespace=namespace)

    async def submit(self, request: TrainingRequest) -> SubmitOutcome:
        """Begin a run, or find the one that the same payload began before.

        Raises:
            RunConflictError: another payload has this run id, or another run this name.
        """
        plan = self.plan(request)
        for _ in range(MAX_TRIES):
            run, named = await self._known(plan.name, request.run_id)
            if run is not None and run.annotations.get(ATTEMPT_ANNOTATION) == plan.options.attempt_id:
                return SubmitOutcome(run, is_new=True)  # the answer to an earlier try was lost
            decision = decide(request, run, named)
            if decision.action == "return" and run is not None:
                return SubmitOutcome(run, is_new=False)
            try:
                return SubmitOutcome(await self._begin(plan, decision.follows), is_new=True)
            except NameTakenError as error:
                refusal = error
        if (other := run or named) is not None:
            raise RunConflictError(str(refusal), other)
        raise refusal

    async def resume(self, name: str, changes: ResumeRequest) -> RunRecord:
        """Begin another attempt at a run that has ended, from its last checkpoint.

        Raises:
            RunNotFoundError: no run of this name is known.
            RunConflictError: the run goes on, or its payload is not known.
        """
        known = await self.run(name)
        if not known.is_ended:
            raise RunConflictError(f"run {known.run_id} goes on as {name}: stop it before you resume it.", known)
        stored = StoredRequest.read(known.annotations)
        if stored is None:
            raise RunConflictError(f"the payload of {name} is not known: POST /train with all of it.", known)
        try:
            request, kept = stored.resumed(changes)
        except ValidationError as error:
            raise UsageError("; ".join(str(each["msg"]) for each in error.errors())) from None
        plan = plan_run(
            request,
            attempt_id=self._new_id(),
            salt=stored.salt,
            namespace=self.backend.default_namespace,
            kept=kept,
        )
        if job_name(request) != name:
            raise UsageError(f"run {known.run_id} has the name {job_name(request)}, not {name}.")
        try:
            return await self._begin(plan, known.job_id)
        except NameTakenError as error:
            now = await self.run(name)
            if now.annotations.get(ATTEMPT_ANNOTATION) == plan.options.attempt_id:
                return now  # the answer to an earlier try was lost
            raise RunConflictError(str(error), now) from None

    async def run(self, name: str) -> RunRecord:
        """Return a run as it is now; RunNotFoundError if there is none."""
        found = await self.backend.get(name)
        if found is None or not found.run_id:  # not a job of a gateway
            raise RunNotFoundError(name)
        return found

    async def stop(self, name: str, *, force: bool) -> RunRecord:
        """Stop a run, and return how it is now; RunNotFoundError if there is none."""
        earlier = await self.run(name)
        await self.backend.stop(name, force=force)
        found = await self.backend.get(name)
        if found is None:  # its backend forgets stopped runs
            return replace(earlier, detail="it is being stopped")
        self.cache.put(found)
        return found

    async def _known(self, name: str, run_id: str) -> tuple[RunRecord | None, RunRecord | None]:
        """Return the newest attempt of this run id, and the newest job of this name."""
        run, named = await asyncio.gather(self.backend.find_run(run_id), self.backend.get(name))
        if named is not None and named.run_id == run_id:  # it may have appeared between the two answers
            run = named if run is None or newest_first(named) < newest_first(run) else run
        return run, named

    async def _begin(self, plan: RunPlan, follows: str) -> RunRecord:
        await self.backend.submit(plan, follows=follows)
        run = await self.run(plan.name)
        self.cache.put(run)
        return run


@dataclass
class Snapshot:
    """All runs, as they were at one time."""

    asked_at: float
    attempts: list[RunRecord]
    """All attempts, newest first."""
    by_name: dict[str, RunRecord] = field(init=False)
    """Newest attempt of each name."""
    bodies: dict[str, bytes] = field(default_factory=dict)
    """Encoded statuses, by name, of the runs that were asked for."""

    def __post_init__(self) -> None:
        self.by_name = {run.name: run for run in reversed(self.attempts)}


class RunCache:
    """The runs of a backend, listed at most once a second, and only on demand.

    Callers wait for a list that is under way. If it fails, all callers of the next second get the same error. Runs that
    this gateway itself submits or stops are in the cache at once.
    """

    def __init__(self, backend: TrainingBackend, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._loading: asyncio.Task[Snapshot] | None = None
        self._due_at = float("-inf")
        """Earliest time of the next list."""
        self._own: dict[str, tuple[float, RunRecord]] = {}
        self._misses = TokenBucket(MISSES_PER_S, MISSES_BURST, clock=clock)

    async def snapshot(self) -> Snapshot:
        """Return the runs as they were at most a second ago."""
        snapshot = self._snapshot
        if snapshot is not None and self._clock() - snapshot.asked_at < MAX_AGE_S:
            return snapshot
        if self._loading is None or (self._loading.done() and self._clock() >= self._due_at):
            self._loading = asyncio.create_task(self._load(self._clock()))
            self._loading.add_done_callback(_retrieve)
        return await asyncio.shield(self._loading)

    async def run(self, name: str) -> RunRecord | None:
        """Return the newest attempt of a name, or None.

        Another gateway may have begun a run after the list was made. A run that the list lacks is therefore requested
        by name, as far as limits allow; otherwise the next list decides.
        """
        began = self._clock()
        snapshot = await self.snapshot()
        if name in snapshot.by_name:
            return snapshot.by_name[name]
        if not self._misses.take():
            while snapshot.asked_at < began:
                await asyncio.sleep(max(0.01, self._due_at - self._clock()))
                snapshot = await self.snapshot()
            return snapshot.by_name.get(name)
        found = await self._backend.get(name)
        if found is None or not found.run_id:
            return None
        self.put(found)
        return found

    def put(self, run: RunRecord) -> None:
        """Add a run that is newer than the list."""
        self._own[run.job_id] = (self._clock(), run)
        if self._snapshot is not None:
            self._snapshot = self._with_own(self._snapshot)

    async def close(self) -> None:
        """Cancel the list that is under way."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    async def _load(self, asked_at: float) -> Snapshot:
        self._due_at = asked_at + MAX_AGE_S
        try:
            async with asyncio.timeout(LIST_WITHIN_S):
                runs = await self._backend.runs()
        except TimeoutError:
            self._due_at = self._clock() + MAX_AGE_S
            raise MasterUnreachableError(f"the cluster did not list its runs within {LIST_WITHIN_S:g} s.") from None
        except BaseException:
            self._due_at = self._clock() + MAX_AGE_S  # an error holds for as long as a list does
            raise
        snapshot = Snapshot(asked_at, runs)
        self._own = {job_id: own for job_id, own in self._own.items() if own[0] >= asked_at}
        self._snapshot = self._with_own(snapshot)
        return self._snapshot

    def _with_own(self, snapshot: Snapshot) -> Snapshot:
        if not self._own:
            return snapshot
        own = {job_id: run for job_id, (_, run) in self._own.items()}
        others = [run for run in snapshot.attempts if run.job_id not in own]
        attempts = sorted([*own.values(), *others], key=newest_first)
        return Snapshot(snapshot.asked_at, attempts)


def newest_first(run: RunRecord) -> tuple[Any, ...]:
    return (-(run.submitted_at or 0.0), run.job_id)


def _retrieve(task: asyncio.Task[Snapshot]) -> None:
    """Retrieve the error, so that asyncio does not log it when no caller is left."""
    if not task.cancelled():
        task.exception()
