"""Owners of a queue as a `Putter` sees them: scripted, and found one after the other."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from unified.bus.calls.future import RpcFuture
from unified.errors import (
    QueueLostError,
    QueueNotFoundError,
    RouteLostError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    WorkerDiedError,
)
from unified.protocol.records import WorkerIncarnation
from unified.queue.core.messages import Outcome
from unified.queue.owner_lookup import OwnerFinder, PutQuestion
from unified.queue.producer import Putter

PATIENCE_S = 10.0
WAITING = [int(Outcome.WAITING), 0]
UNKNOWN = [int(Outcome.UNKNOWN), 0]
LOST = RouteLostError("the connection broke")
DIED = WorkerDiedError("killed")


class Site:
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


class Finder:
    """Has the sites one after the other; None in between means that `attach` finds no owner."""

    handle = 7
    queue = "q"
    worker = SimpleNamespace(bus=None)

    def __init__(self, *sites: Site | None) -> None:
        self.sites = list(sites)
        self.site = self.sites.pop(0)
        self.num_pauses = 0

    def check_process(self) -> None:
        pass

    def attach(self, until: float | None = None) -> Any:
        self.site = self.sites.pop(0) if self.sites else None
        if self.site is None:
            raise QueueNotFoundError("nobody has made it")
        return self.site

    def detach(self, site: Site) -> None:
        if self.site is site:
            self.site = None

    def failed(self, site: Site, error: RpcError) -> None:
        if isinstance(error, RouteLostError | RpcTimeoutError):
            return
        if isinstance(error, RpcCancelledError) and self.site is not site:
            return
        if not isinstance(error, WorkerDiedError):
            raise error
        self.detach(site)
        if not site.is_durable:
            raise QueueLostError("gone")

    def silent(self, holder: WorkerIncarnation, consequence: str = "") -> QueueNotFoundError:
        return QueueNotFoundError(f"{holder.worker} is silent. {consequence}")

    def pause(self, num_failed: int, until: float | None = None) -> None:
        self.num_pauses += 1

    def result_of(self, site: Site, answer: Future[Any], until: float | None, nbytes: int) -> Any:
        return answer.result(PATIENCE_S)


def putter(*sites: Site | None) -> Putter:
    return Putter(cast(OwnerFinder, Finder(*sites)))


def puts(which: Putter, count: int) -> list[Future[None]]:
    return [which.put_async([b"%d" % number]) for number in range(count)]
