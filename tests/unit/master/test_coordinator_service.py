"""The coordinator behind the master's socket: its actions in the master's words, and what it hears of jobs."""

from typing import Any

from unified.config.settings import Intervals
from unified.protocol.client_master import Done, MasterAnswer, Refused
from unified.protocol.coordinator import (
    BarrierResponse,
    CoordinatorRequest,
    DataRequest,
    GetDataShard,
    Heartbeat,
    HeartbeatResponse,
    MarkDone,
    NotifyCheckpoint,
    RegisterDataset,
    RegisterWorker,
    RestorePosition,
    SetDataWorker,
    WaitBarrier,
    WorkerRegistration,
)
from unified.protocol.records import EventRecord, WorkerState
from unified_master.coordinator_service import CoordinatorReceived, CoordinatorService
from unified_master.core.master import MasterCore
from unified_master.core.messages import MasterAction, ReportEvent, SaveRecord, Send
from unified_master.core.state import JobRecord, WorkerRecord

NOW = 1000.0


class Behind:
    """A desk, and the store that it writes to."""

    def __init__(self, kept: dict[tuple[str, str], bytes] | None = None) -> None:
        self.kept = kept or {}
        self.master = MasterCore(Intervals())
        self.service = CoordinatorService(self.master)
        self.service.restore(NOW, [(*key, data) for key, data in self.kept.items()])
        self.reports: list[EventRecord] = []

    def ask(self, request: CoordinatorRequest, request_id: int = 1) -> list[MasterAnswer]:
        asked = CoordinatorReceived(peer=b"p", request_id=request_id, request=request)
        return [message for _, message in self.take(self.service.answer(NOW, asked))]

    def take(self, actions: list[MasterAction]) -> list[tuple[int, MasterAnswer]]:
        answers: list[tuple[int, MasterAnswer]] = []
        for action in actions:
            if isinstance(action, SaveRecord):
                self.kept.pop((action.kind, action.key), None)
                if action.data is not None:
                    self.kept[action.kind, action.key] = action.data
            elif isinstance(action, ReportEvent):
                self.reports.append(action.record)
            elif isinstance(action, Send) and isinstance(action.message, MasterAnswer):
                answers.append((action.request_id, action.message))
        return answers

    def register(self, rank: int) -> None:
        worker = RegisterWorker(space="job-1", worker_id=f"w{rank}", session="s", rank=rank, world_size=2)
        (answer,) = self.ask(worker)
        assert isinstance(answer, WorkerRegistration)


def test_the_end_of_an_incarnation_releases_those_who_wait_for_it() -> None:
    behind = Behind()
    behind.register(0)
    behind.register(1)
    wait = WaitBarrier(space="job-1", barrier_id="b", worker_id="w0", session="s", arrival=1, world_size=2)
    assert behind.ask(wait, request_id=5) == []
    ended = EventRecord(at=NOW, event="worker-failed", reason="signal 9", job="job-1", worker="w1", sequence=1)
    elsewhere = EventRecord(at=NOW, event="worker-failed", reason="signal 9", job="job-2", worker="w1", sequence=2)
    assert behind.take(behind.service.hear(NOW, [ReportEvent(record=elsewhere)])) == []
    ((request_id, answer),) = behind.take(behind.service.hear(NOW, [ReportEvent(record=ended)]))
    assert isinstance(answer, BarrierResponse)
    assert (request_id, answer.released_by, answer.lost) == (5, "lost", ["w1"])
    assert "signal 9" in answer.reason
    assert "worker-lost" in [record.event for record in behind.reports]
    assert len({record.sequence for record in behind.reports}) == len(behind.reports)


def test_what_is_saved_is_known_to_the_next_one_and_forgotten_with_the_job() -> None:
    behind = Behind()
    behind.register(0)
    behind.ask(NotifyCheckpoint(space="job-1", worker_id="w0", step=3, path="p"))
    assert behind.kept
    assert all(kind.startswith("coordinator-") for kind, _ in behind.kept)
    after = Behind(dict(behind.kept))
    (answer,) = after.ask(Heartbeat(space="job-1", worker_id="w0", session="s"))
    assert isinstance(answer, HeartbeatResponse)
    assert answer.is_known
    assert after.kept == behind.kept
    assert after.service.next_deadline is not None
    after.take(after.service.hear(NOW, [SaveRecord(kind="job", key="job-1", data=None)]))
    assert after.kept == {}
    assert after.service.next_deadline is None


def test_silence_is_noticed_in_time() -> None:
    behind = Behind()
    behind.register(0)
    due = behind.service.next_deadline
    assert due is not None
    behind.take(behind.service.time_passed(due))
    assert [record.event for record in behind.reports][-1] == "worker-lost"
    (answer,) = behind.ask(Heartbeat(space="job-1", worker_id="w0", session="s"))
    assert isinstance(answer, HeartbeatResponse)
    assert not answer.is_known


def test_a_past_incarnation_of_a_jobs_worker_is_refused_though_none_ever_registered() -> None:
    behind = Behind()
    behind.ask(RegisterDataset(space="job-1", dataset_id="d", path="p", format="csv", total_samples=2, shard_size=1))
    worker = WorkerRecord(job_id="job-1", name="w0", incarnation=1)
    behind.master.cluster.jobs["job-1"] = JobRecord(job_id="job-1", sequence=1, workers={"w0": worker})

    def of(incarnation: int) -> list[DataRequest]:
        about: dict[str, Any] = {"space": "job-1", "dataset_id": "d", "worker_id": "w0", "incarnation": incarnation}
        return [SetDataWorker(**about), GetDataShard(**about, epoch=0), MarkDone(**about, epoch=0, shard_ids=[0])]

    def answers(incarnation: int) -> list[MasterAnswer]:
        return [answer for request in of(incarnation) for answer in behind.ask(request)]

    answers(1)
    kept = dict(behind.kept)
    for answer in answers(0):
        assert isinstance(answer, Refused)
        assert (answer.code, "newer incarnation" in answer.reason) == ("replaced", True)
    assert behind.kept == kept
    for incarnation in (-1, 1):
        assert not any(isinstance(answer, Refused) for answer in answers(incarnation))


def test_the_master_says_which_of_those_that_loaded_a_position_still_run() -> None:
    behind = Behind()
    behind.ask(RegisterDataset(space="job-1", dataset_id="d", path="p", format="csv", total_samples=4, shard_size=1))
    workers = {name: WorkerRecord(job_id="job-1", name=name, incarnation=0, is_desired=True) for name in ("w0", "w1")}
    behind.master.cluster.jobs["job-1"] = JobRecord(job_id="job-1", sequence=1, workers=workers)

    def load(name: str, *done: int) -> type[MasterAnswer]:
        incarnation = workers[name].incarnation
        about: dict[str, Any] = {"space": "job-1", "dataset_id": "d", "worker_id": name, "incarnation": incarnation}
        request = RestorePosition(**about, epoch=0, done=list(done), process=f"{name}/{incarnation}", number=1)
        (answer,) = behind.ask(request)
        return type(answer)

    assert [load("w0", 1), load("w1", 2), load("w1", 1)] == [Done, Refused, Done]
    workers["w1"].incarnation = 1
    assert [load("w1", 2), load("w1", 1)] == [Refused, Done]
    workers["w0"].state = WorkerState.EXITED
    workers["w1"].incarnation = 2
    assert load("w1", 2) is Done
    workers["w0"].state, workers["w0"].incarnation = WorkerState.RUNNING, 1
    assert [load("w0", 1), load("w0", 2)] == [Refused, Done]
