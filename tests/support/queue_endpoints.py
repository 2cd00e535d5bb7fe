"""Owners of a queue as a `QueueProducer` sees them: scripted, and found one after the other."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from tests.support.deadlines import met
from unified.bus.calls.future import RpcFuture
from unified.errors import (
    QueueLostError,
    QueueNotFoundError,
    RouteLostError,
    RpcError,
    RpcTimeoutError,
    WorkerDiedError,
)
from unified.protocol.records import WorkerIncarnation
from unified.queue.core.messages import Outcome
from unified.queue.owner_lookup import OwnerLookup, PutQuestion
from unified.queue.producer import QueueProducer

DEADLINE_S = met(100.0)
WAITING = [int(Outcome.WAITING), 0]
UNKNOWN = [int(Outcome.UNKNOWN), 0]
LOST = RouteLostError("the connection broke")
DIED = WorkerDiedError("killed")


class FakeEndpoint:
    """Notes the questions. To one after the other it says what its script says, an answer, an error, or "later", and in
    the end always DONE."""

    is_here = False
    holder = WorkerIncarnation("a", 0)

    def __init__(self, *script: Any, is_durable: bool = False) -> None:
        self.script = list(script)
        self.is_durable = is_durable
        self.asked: list[PutQuestion] = []
        self.later: list[RpcFuture[Any]] = []

    def put(self, question: PutQuestion, nbytes: int, until: float | None) -> RpcFuture[Any]:
        self.asked.append(question)
        says = self.script.pop(0) if self.script else None
        future: RpcFuture[Any] = RpcFuture()
        if says == "later":
            self.later.append(future)
        elif isinstance(says, Exception):
            future.fail(says)
        else:
            future.succeed(says)
        return future

    @property
    def numbers(self) -> list[int]:
        return [question[1] for question in self.asked]


class FakeLookup:
    """Has the endpoints one after the other; None in between means that `attach` finds no owner."""

    handle = 7
    queue = "q"
    worker = SimpleNamespace(bus=None)

    def __init__(self, *endpoints: FakeEndpoint | None) -> None:
        self.endpoints = list(endpoints)
        self.endpoint = self.endpoints.pop(0)
        self.before_attach: Callable[[], object] = lambda: None
        self.num_pauses = 0

    def check_process(self) -> None:
        pass

    def attach(self, until: float | None = None) -> Any:
        self.before_attach()
        self.endpoint = self.endpoints.pop(0) if self.endpoints else None
        if self.endpoint is None:
            raise QueueNotFoundError("nobody has made it")
        return self.endpoint

    def detach(self, endpoint: FakeEndpoint) -> None:
        if self.endpoint is endpoint:
            self.endpoint = None

    def failed(self, endpoint: FakeEndpoint, error: RpcError) -> None:
        if isinstance(error, RouteLostError | RpcTimeoutError):
            return
        if not isinstance(error, WorkerDiedError):
            raise error
        self.detach(endpoint)
        if not endpoint.is_durable:
            raise QueueLostError("gone")

    def silent(self, holder: WorkerIncarnation, consequence: str = "") -> QueueNotFoundError:
        return QueueNotFoundError(f"{holder.worker} is silent. {consequence}")

    def pause(self, num_failed: int, until: float | None = None) -> None:
        self.num_pauses += 1


def producer_of(*endpoints: FakeEndpoint | None) -> QueueProducer:
    return QueueProducer(cast(OwnerLookup, FakeLookup(*endpoints)))


def puts(which: QueueProducer, count: int) -> list[Future[None]]:
    return [which.put_async([b"%d" % number]) for number in range(count)]


def put(how: str, which: QueueProducer) -> None:
    """Put one item by the method of this name, and wait until it is in."""
    if how == "put":
        which.put([b"a"], None)
    else:
        which.put_async([b"a"]).result(DEADLINE_S)
