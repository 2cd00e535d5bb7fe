"""A coordinator's core with a store and with workers that ask: for tests without either."""

from typing import Any, Literal, TypeVar

from tests.support.invariants.coordinator import check
from unified.coordinator.core.coordinator import CoordinatorCore
from unified.coordinator.core.messages import (
    AnswerRequest,
    CoordinatorTick,
    Event,
    Forget,
    LogEvent,
    Persist,
    RequestCame,
    Token,
    WorkerGone,
)
from unified.protocol.client_master import Done, MasterAnswer, Refused
from unified.protocol.coordinator import (
    BarrierResponse,
    CoordinatorRequest,
    DatasetRegistration,
    DataShards,
    FileRun,
    GetDataShard,
    Heartbeat,
    MarkDone,
    RegisterDataset,
    RegisterWorker,
    SetDataWorker,
    WaitBarrier,
)

A = TypeVar("A", bound=MasterAnswer)


class Story:
    """Every step is checked: the order of its actions, and that the core's invariants hold."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.core = CoordinatorCore()
        self.store: dict[tuple[str, str], bytes] = {}
        self.answers: dict[Token, MasterAnswer] = {}
        self.reports: list[LogEvent] = []
        self.num_writes = 0
        self.num_asked = 0

    def tell(self, event: Event) -> list[AnswerRequest]:
        """What it answers; kept by token, too."""
        actions = self.core.step(self.now, event)
        order = [[Persist, Forget, LogEvent, AnswerRequest].index(type(action)) for action in actions]
        assert order == sorted(order)
        assert order.count(0) <= 1
        assert order.count(1) <= 1
        given = []
        for action in actions:
            match action:
                case Persist(rows=rows):
                    self.num_writes += 1
                    self.store.update({(kind, key): data for kind, key, data in rows})
                case Forget(keys=keys):
                    for key in keys:
                        del self.store[key]
                case LogEvent():
                    self.reports.append(action)
                case AnswerRequest():
                    assert action.token not in self.answers, "a question was answered twice"
                    self.answers[action.token] = action.answer
                    given.append(action)
        assert check(self.core) == []
        return given

    def send(self, request: CoordinatorRequest, incarnations: dict[str, int] | None = None) -> Token:
        """Ask; the answer may come later."""
        self.num_asked += 1
        token = (b"peer", self.num_asked)
        self.tell(RequestCame(token=token, request=request, incarnations=incarnations))
        return token

    def ask(self, request: CoordinatorRequest, expected: type[A], incarnations: dict[str, int] | None = None) -> A:
        """The answer, which comes at once and is of this kind."""
        answer = self.answers[self.send(request, incarnations)]
        assert isinstance(answer, expected), answer
        return answer

    def refused(self, request: CoordinatorRequest, incarnations: dict[str, int] | None = None) -> Refused:
        return self.ask(request, Refused, incarnations)

    def refuses(
        self, request: CoordinatorRequest, code: str, *words: str, incarnations: dict[str, int] | None = None
    ) -> None:
        """It is refused with this code, and each of these words is in the reason."""
        refusal = self.refused(request, incarnations)
        assert refusal.code == code
        for each in words:
            assert each in refusal.reason

    def after(self, seconds: float) -> list[AnswerRequest]:
        until = self.now + seconds
        given = []
        while (due := self.core.next_deadline) is not None and due <= until:
            self.now = max(self.now, due)
            given += self.tell(CoordinatorTick())
        self.now = until
        return given

    def restart(self, after_s: float = 0.0) -> None:
        self.now += after_s
        self.core = CoordinatorCore()
        self.core.restore(self.now, [("node", "n1", b"not ours"), *((*key, data) for key, data in self.store.items())])
        assert check(self.core) == []

    def beat(self, *worker_ids: str, space: str = "") -> list[bool]:
        """Heartbeats of these, each with its first session."""
        requests = [Heartbeat(space=space, worker_id=each, session=f"{each}/0") for each in worker_ids]
        return [self.core.heartbeat(self.now, request).is_known for request in requests]

    def release(self, token: Token) -> BarrierResponse | None:
        """What an arrival was answered; None if it waits."""
        answer = self.answers.get(token)
        assert answer is None or isinstance(answer, BarrierResponse), answer
        return answer

    def told(self, token: Token) -> BarrierResponse:
        """What an arrival was answered, which it was."""
        answer = self.release(token)
        assert answer is not None
        return answer

    def shards(self, dataset_id: str, worker_id: str, epoch: int = 0) -> list[int]:
        request = GetDataShard(dataset_id=dataset_id, worker_id=worker_id, epoch=epoch)
        return [each.shard_id for each in self.ask(request, DataShards).shards]


def worker(name: str, incarnation: int = 0, **fields: Any) -> RegisterWorker:
    """``w3`` has rank 3 of 4, unless told otherwise."""
    rank = int(name[1:]) if name[1:].isdigit() else -1
    return RegisterWorker(
        **{"worker_id": name, "session": f"{name}/{incarnation}", "rank": rank, "world_size": 4, **fields}
    )


def killed(name: str) -> WorkerGone:
    return WorkerGone(space="", worker_id=name, reason="it was killed by signal 9")


def wait(
    name: str,
    arrival: int = 1,
    *,
    barrier_id: str = "b",
    incarnation: int = 0,
    world_size: int = 4,
    timeout_s: float | None = None,
    on_loss: Literal["fail", "shrink"] = "fail",
    space: str = "",
) -> WaitBarrier:
    return WaitBarrier(
        space=space,
        barrier_id=barrier_id,
        worker_id=name,
        session=f"{name}/{incarnation}",
        arrival=arrival,
        world_size=world_size,
        timeout_s=timeout_s,
        on_loss=on_loss,
    )


def dataset(dataset_id: str = "d", files: list[FileRun] | None = None, **fields: Any) -> RegisterDataset:
    values = {"path": "/data/d", "format": "parquet", "total_samples": 100, "shard_size": 10, **fields}
    return RegisterDataset(dataset_id=dataset_id, files=files or [], **values)


def four(**fields: Any) -> Story:
    story = Story()
    for name in ("w0", "w1", "w2", "w3"):
        story.send(worker(name, **fields))
    return story


def spread(story: Story, *workers: str, **fields: Any) -> Story:
    """Dataset d is registered, and spread over these workers."""
    story.ask(dataset(**fields), DatasetRegistration)
    for name in workers:
        story.ask(SetDataWorker(dataset_id="d", worker_id=name), Done)
    return story


def get(name: str, epoch: int = 0, incarnation: int = 0) -> GetDataShard:
    return GetDataShard(dataset_id="d", worker_id=name, session=f"{name}/{incarnation}", epoch=epoch)


def done(name: str, *shard_ids: int, epoch: int = 0, incarnation: int = 0) -> MarkDone:
    return MarkDone(
        dataset_id="d", worker_id=name, session=f"{name}/{incarnation}", epoch=epoch, shard_ids=list(shard_ids)
    )
