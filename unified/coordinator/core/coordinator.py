"""A coordinator's core: one entry, `step(now, event) -> actions`. It decides everything and touches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import msgspec

from unified.coordinator.core import barriers, checkpoints, datasets, messages, positions, workers
from unified.coordinator.core.persistence import forget, restore
from unified.coordinator.core.state import CoordinatorTimers, Space, heard
from unified.coordinator.core.workers import HEARTBEAT_TIMES, HeartbeatTimes
from unified.errors import DatasetError, RefusedError, UsageError
from unified.protocol import coordinator as protocol
from unified.protocol.client_master import Done, MasterAnswer, Refused

MAX_SPACES = 200
"""Most spaces in one answer: the newest."""
_UNKNOWN = protocol.HeartbeatResponse(is_known=False, revision=0)


class CoordinatorCore:
    """Workers, barriers, datasets and checkpoints of any number of spaces: pure and deterministic.

    Time is an argument of each call: seconds since 1970, on a clock that never goes back while the coordinator runs.
    A step returns at most one `Persist`, then at most one `Forget`, then `LogEvent`s, then `Answer`s.

    Codes of refusals: ``bad-request``; ``not-found`` (dataset, epoch, member of a dataset); ``name-taken`` (a dataset
    with other values, a rank); ``ended`` (an epoch that is past); ``replaced`` (an incarnation that a newer one
    followed: it should end); ``unknown-worker`` (not registered, or lost: it may register again).
    """

    def __init__(self, heartbeats: HeartbeatTimes = HEARTBEAT_TIMES) -> None:
        self.heartbeats = heartbeats
        self.spaces: dict[str, Space] = {}
        self.timers = CoordinatorTimers()

    @property
    def next_deadline(self) -> float | None:
        """Time at which `CoordinatorTick` is due; None if nothing is awaited."""
        return self.timers.next_deadline

    def restore(self, now: float, rows: Iterable[messages.Row]) -> None:
        """Go on from persisted rows. Call it once, before the first step. Rows of other kinds are ignored.

        Present workers get their whole time-out to be heard again. Workers that waited at a barrier ask again.
        CoordinatorError: the rows are not readable.
        """
        restore(self.spaces, self.timers, now, rows, await_s=self.heartbeats.timeout_s)

    def step(self, now: float, event: messages.Event) -> list[messages.Action]:
        """Return the actions for an event. Every event is handled in every state; there may be no actions."""
        step = messages.CoordinatorStep(now)
        match event:
            case messages.RequestCame():
                name = event.request.space
                space = self.spaces.get(name) or Space(name, self.timers)
                self._answer(step, space, event)
                if not space.is_empty:  # else a request about nothing would be remembered for ever
                    self.spaces[name] = space
            case messages.WorkerGone():
                gone = self.spaces.get(event.space)
                presence = gone.present.get(gone.id_of(event.worker_id)) if gone is not None else None
                if gone is not None and presence is not None:
                    workers.remove(step, gone, presence, event.reason, "worker-lost")
            case messages.SpaceClosed():
                closed = self.spaces.pop(event.space, None)
                if closed is not None:
                    barriers.close(step, closed)
                    forget(step, closed)
            case messages.CoordinatorTick():
                self._deadline_reached(step)
            case _:
                assert_never(event)
        for (space_name, dataset_id), members in step.members.items():
            datasets.spread(step, self.spaces[space_name], dataset_id, members)
        return step.actions()

    def heartbeat(self, now: float, request: protocol.Heartbeat) -> protocol.HeartbeatResponse:
        """Answer a heartbeat like a step, without the cost of a step. Persisted state does not change.

        The answer is the same object until the revision of the space changes, so a shell may keep its encoding.
        """
        space = self.spaces.get(request.space)
        if space is None:
            return _UNKNOWN
        presence = space.present.get(request.worker_id)
        if presence is None or presence.session != request.session:
            return space.unknown
        heard(space, presence, now)
        return space.alive

    def _answer(self, step: messages.CoordinatorStep, space: Space, event: messages.RequestCame) -> None:
        try:
            answer = self._handle(step, space, event)
        except RefusedError as refusal:
            answer = Refused(code=refusal.code, reason=refusal.reason)
        except (UsageError, DatasetError) as error:
            answer = Refused(code="bad-request", reason=str(error))
        if answer is not None:
            step.answer(event.token, answer)

    def _handle(self, step: messages.CoordinatorStep, space: Space, event: messages.RequestCame) -> MasterAnswer | None:
        request = event.request
        if isinstance(request, protocol.DataRequest) and request.is_id:
            request = msgspec.structs.replace(request, worker_id=space.member_of(request.worker_id), is_id=False)
        match request:
            case protocol.Heartbeat():
                return self.heartbeat(step.now, request)
            case protocol.GetDataShard():
                return datasets.shards(step, space, request)
            case protocol.GetRankFiles():
                return datasets.rank_files(space, request)
            case protocol.MarkDone():
                return datasets.mark_done(step, space, request)
            case protocol.WaitBarrier():
                return barriers.wait(step, space, event.token, request)
            case protocol.LeaveBarrier():
                barriers.leave(step, space, request)
                return Done()
            case protocol.RegisterWorker():
                return workers.register(step, space, request, self.heartbeats)
            case protocol.DeregisterWorker():
                return workers.deregister(step, space, request)
            case protocol.RegisterDataset():
                return datasets.register(step, space, request)
            case protocol.RestorePosition():
                return positions.restore(step, space, request, event.incarnations)
            case protocol.SetDataWorker():
                return datasets.set_worker(step, space, request, self.heartbeats.timeout_s)
            case protocol.AdvanceEpoch():
                return datasets.advance(step, space, request)
            case protocol.GetDatasets():
                return datasets.listing(space)
            case protocol.DescribeSpaces():
                known = list(self.spaces.values())[-MAX_SPACES:] if request.is_every_space else [space]
                return protocol.SpaceList(spaces=[_status(each) for each in known])
            case protocol.NotifyCheckpoint():
                return checkpoints.notify(step, space, request)
            case protocol.GetLatestCheckpoint():
                return checkpoints.latest(space, request)
            case protocol.TellEvent():
                return checkpoints.tell(step, space, request)
            case _:
                raise UsageError(f"a coordinator does not know {type(request).__name__}.")

    def _deadline_reached(self, step: messages.CoordinatorStep) -> None:
        due = self.next_deadline
        late_s = step.now - due if due is not None else 0.0
        for presence in self.timers.leases.expired(step.now):
            worker = presence.worker
            is_late = late_s > worker.timeout_s / 2
            workers.silent(step, self.spaces[worker.info.space], presence, is_late=is_late)
        for space_name, barrier_id in self.timers.barriers.due(step.now):
            space = self.spaces[space_name]
            barriers.overdue(step, space, space.barriers[barrier_id])
        unheard: dict[tuple[str, str], list[str]] = {}
        for space_name, dataset_id, member in self.timers.awaited.due(step.now):
            unheard.setdefault((space_name, dataset_id), []).append(member)
        for (space_name, dataset_id), members in unheard.items():
            datasets.give_up(step, self.spaces[space_name], dataset_id, members, self.heartbeats.timeout_s)


def _status(space: Space) -> protocol.SpaceStatus:
    present = [presence.worker.info for presence in space.present.values()]
    return protocol.SpaceStatus(
        space=space.name,
        datasets=datasets.listing(space).datasets,
        barriers=barriers.listing(space),
        checkpoints=checkpoints.listing(space),
        workers=[
            protocol.PresentWorker(worker_id=each.worker_id, hostname=each.hostname, rank=each.rank) for each in present
        ],
    )
