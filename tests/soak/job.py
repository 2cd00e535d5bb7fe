"""The roles of the soak: peers that call each other and are killed, an elder that is not, and owners of queues."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from tests.soak import payload
from tests.soak.calls import Books, Caller
from tests.soak.journal import Incarnation, Journal
from tests.soak.queues import Consumer, Producer
from unified import RoleGroup, current_worker, rpc
from unified.api.runtime import DataQueue
from unified.errors import RouteLostError, WorkerDiedError

QUEUES = {"plain": "keeper", "durable": "vault"}
"""Name to the role that owns it."""
QUEUE_SIZE = 100
KEPT_MIB = 500
"""Just below the default of UNIFIED_KEEP_FREED_MB."""
CALLERS = 1
ASYNC_CALLERS = 3
LOOK_S = 0.5
POLL_S = 0.1
DRAINED_FOR_S = 3.0


def folder() -> Path:
    return Path(current_worker().job_info.user_config.folder)


def has(name: str) -> bool:
    """Whether the parent has set this sign."""
    return (folder() / name).exists()


def begin() -> tuple[Incarnation, Journal]:
    """This incarnation, and its journal with the first line in it."""
    worker = current_worker()
    incarnation = Incarnation(f"{worker.actor_info.role}-{worker.actor_info.rank}", worker.incarnation)
    journal = Journal(folder(), incarnation)
    journal.write("start", worker.bus.inbox_id)
    return incarnation, journal


class Peer:
    """Answers calls, makes calls, fills and empties queues."""

    def __init__(self) -> None:
        self.incarnation, self.journal = begin()
        self.group = RoleGroup(roles=["peer", "elder"])
        self.kept = payload.Shelf()

    # -- what others call --------------------------------------------------------------------------------------------

    @rpc
    def echo(self, value: Any) -> Any:
        return value

    @rpc(inline=True)
    def echo_inline(self, value: Any) -> Any:
        return value

    @rpc
    async def echo_async(self, value: Any) -> Any:
        await asyncio.sleep(0.001)
        return value

    @rpc
    def take(self, value: Any, nbytes: int, mark: int) -> str:
        """What is wrong with it, or with what was taken before."""
        return payload.complaint(value, nbytes, mark) or self.kept.put(value, nbytes, mark)

    @rpc
    def give(self, nbytes: int, mark: int, kind: str) -> Any:
        return payload.make(nbytes, mark, kind)

    @rpc
    def fail(self, why: str) -> None:
        raise KeyError(why)

    @rpc
    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @rpc
    async def nap_async(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @rpc(inline=True)
    def add_one(self, number: int) -> int:
        return number + 1

    @rpc
    def ask(self, name: str, number: int) -> Any:
        """A call from inside a handler."""
        actor = next(actor for actor in self.group if actor.name == name)
        try:
            return actor.call("add_one", number, _timeout=20.0).result()
        except (WorkerDiedError, RouteLostError):
            return "died"

    @rpc
    def count(self, number: int, nbytes: int) -> Iterator[tuple[int, Any]]:
        for place in range(number):
            yield place, payload.make(nbytes, place % 256, "array")

    @rpc
    async def count_async(self, number: int, nbytes: int) -> AsyncIterator[tuple[int, Any]]:
        for place in range(number):
            if place % 50 == 0:
                await asyncio.sleep(0.001)
            yield place, payload.make(nbytes, place % 256, "bytes")

    # -- what it does by itself --------------------------------------------------------------------------------------

    def run(self) -> None:
        books = Books(self.journal)
        for name in QUEUES:
            self.start(Producer(self.journal, self.incarnation, name).run, lambda: has("calm"))
            is_explicit = self.incarnation.worker[-1] in "02468"
            self.start(Consumer(self.journal, self.incarnation, name, is_explicit=is_explicit).run, lambda: has("stop"))
        for number in range(CALLERS):
            self.start(self.caller(books, number).run, lambda: has("calm"))
        self.start(self.call_async, books)
        while not has("stop"):
            time.sleep(LOOK_S)
            books.look()
            if has("calm") and not books.num_open:
                (folder() / f"quiet.{self.incarnation.worker}").touch()
        books.look()

    def caller(self, books: Books, number: int) -> Caller:
        return Caller(books, self.group, f"{self.incarnation}{number}")

    def call_async(self, books: Books) -> None:
        async def all_of_them() -> None:
            callers = [self.caller(books, number + CALLERS) for number in range(ASYNC_CALLERS)]
            await asyncio.gather(*(caller.run_async(lambda: has("calm")) for caller in callers))

        asyncio.run(all_of_them())

    def start(self, function: Callable[..., None], *args: Any) -> None:
        def guarded() -> None:
            try:
                function(*args)
            except BaseException as error:  # of this program or of the product: both must be seen
                self.journal.write("wrong", f"a thread ended in {type(error).__name__}: {error}")
                raise

        threading.Thread(target=guarded, daemon=True).start()


class Elder(Peer):
    """A peer that nobody kills, so that its memory can be watched.

    What a worker keeps of freed memory for its next arrays is filled first: else each time that more payloads than ever
    happened to be there at once it would keep more, and that would look like a leak.
    """

    def __init__(self) -> None:
        filler = bytearray(b"\xff") * (KEPT_MIB << 20)
        del filler
        super().__init__()


class Vault:
    """Owns the durable queue, and is killed."""

    def __init__(self) -> None:
        begin()
        self.queue: DataQueue[Any] = DataQueue("durable", is_master=True, size=QUEUE_SIZE, durable=True)

    def run(self) -> None:
        while not has("stop"):
            time.sleep(POLL_S)


class Keeper:
    """The driver role: owns the other queue, and says when both are empty."""

    def __init__(self) -> None:
        begin()
        self.queue: DataQueue[Any] = DataQueue("plain", is_master=True, size=QUEUE_SIZE)

    def run(self) -> None:
        queues = [self.queue, DataQueue[Any]("durable")]
        empty_since = 0.0
        while not has("stop"):
            time.sleep(POLL_S)
            if not has("calm"):
                continue
            found = [queue.stats() for queue in queues]
            (folder() / "queues").write_text("\n".join(map(repr, found)))
            is_empty = not any(each.depth or each.leased for each in found)
            empty_since = (empty_since or time.monotonic()) if is_empty else 0.0
            if empty_since and time.monotonic() > empty_since + DRAINED_FOR_S:
                (folder() / "drained").touch()
        time.sleep(LOOK_S * 4)  # the peers look for the sign too, and acknowledge what they hold
