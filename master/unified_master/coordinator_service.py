"""The coordinator of data, barriers and checkpoints as a service of the master: its core behind our socket and store.

Workers of a job meet in the space that has the job's id. The service hears the reports of the master's core, so that a
barrier learns of a worker's end at once, and not by missed heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable

from unified.coordinator.core import messages
from unified.coordinator.core.coordinator import CoordinatorCore
from unified.coordinator.core.state import REPLACED
from unified.coordinator.core.workers import HEARTBEAT_TIMES, HeartbeatTimes
from unified.protocol.client_master import Refused
from unified.protocol.coordinator import CoordinatorRequest, DataRequest, Heartbeat, RestorePosition
from unified.protocol.records import WorkerState
from unified.values import Value
from unified_master.core.master import MasterCore
from unified_master.core.messages import MasterAction, ReportEvent, SaveRecord, Send
from unified_master.core.restore import Record

INCARNATION_ENDS = frozenset({"worker-finished", "worker-exited", "worker-failed"})
"""Events of the master's core after which an incarnation makes no more requests."""


class CoordinatorReceived(Value, frozen=True, kw_only=True):
    """A worker's request to the coordinator; the answer goes to `peer`."""

    peer: bytes
    request_id: int
    request: CoordinatorRequest


class CoordinatorService:
    """The coordinator's core behind the master's socket and store. The master's core keeps the event log."""

    def __init__(self, master: MasterCore, heartbeats: HeartbeatTimes = HEARTBEAT_TIMES) -> None:
        self._core = CoordinatorCore(heartbeats)
        self._master = master

    @property
    def next_deadline(self) -> float | None:
        """Time at which `time_passed` is due; None if nothing is awaited."""
        return self._core.next_deadline

    def restore(self, now: float, records: Iterable[Record]) -> None:
        """Go on from the saved records; CoordinatorError: they are not readable."""
        self._core.restore(now, records)

    def answer(self, now: float, asked: CoordinatorReceived) -> list[MasterAction]:
        """Return the actions that a request leads to; the answer at a barrier comes from a later call."""
        peer, request_id, request = asked.peer, asked.request_id, asked.request
        if isinstance(request, Heartbeat):  # thousands a second, and none is saved
            return [Send(peer=peer, request_id=request_id, message=self._core.heartbeat(now, request))]
        if isinstance(request, DataRequest) and request.incarnation >= 0 and self._is_past(request):
            reason = f"worker {request.worker_id} {REPLACED}"
            return [Send(peer=peer, request_id=request_id, message=Refused(code="replaced", reason=reason))]
        incarnations = self._incarnations(request.space) if isinstance(request, RestorePosition) else None
        return self._step(
            now, messages.RequestCame(token=(peer, request_id), request=request, incarnations=incarnations)
        )

    def time_passed(self, now: float) -> list[MasterAction]:
        """Return the actions that are due at `next_deadline`."""
        return self._step(now, messages.CoordinatorTick())

    def hear(self, now: float, actions: Iterable[MasterAction]) -> list[MasterAction]:
        """Return the actions that follow from the master's: incarnations ended, or jobs were forgotten."""
        found: list[MasterAction] = []
        for action in actions:
            if isinstance(action, ReportEvent) and action.record.event in INCARNATION_ENDS:
                record, reason = action.record, f"its process ended ({action.record.reason})"
                found += self._step(now, messages.WorkerGone(space=record.job, worker_id=record.worker, reason=reason))
            elif isinstance(action, SaveRecord) and action.kind == "job" and action.data is None:
                found += self._step(now, messages.SpaceClosed(space=action.key))
        return found

    def _is_past(self, request: DataRequest) -> bool:
        """Return True if a newer incarnation of the request's worker has begun."""
        worker = self._master.cluster.worker(request.space, request.worker_id)
        return worker is not None and request.incarnation < worker.incarnation

    def _incarnations(self, space: str) -> dict[str, int] | None:
        """Return the desired incarnation of each unfinished worker of a job; None if no job has this space."""
        job = self._master.cluster.jobs.get(space)
        if job is None:
            return None
        ended = (WorkerState.FINISHED, WorkerState.EXITED)
        running = [worker for worker in job.workers.values() if worker.is_desired and worker.state not in ended]
        return {worker.name: worker.incarnation for worker in running}

    def _step(self, now: float, event: messages.Event) -> list[MasterAction]:
        translated: list[MasterAction] = []
        for action in self._core.step(now, event):
            match action:
                case messages.AnswerRequest(token=(peer, request_id), answer=answer):
                    translated.append(Send(peer=peer, request_id=request_id, message=answer))
                case messages.Persist(rows=rows):
                    translated += [SaveRecord(kind=kind, key=key, data=data) for kind, key, data in rows]
                case messages.Forget(keys=keys):
                    translated += [SaveRecord(kind=kind, key=key, data=None) for kind, key in keys]
                case messages.LogEvent():
                    translated.append(
                        self._master.remark(now, action.event, action.reason, action.space, action.worker_id)
                    )
        return translated
