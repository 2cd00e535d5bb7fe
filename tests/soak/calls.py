"""The calls of the soak: what is asked of whom, how it may end, and the books that are kept of it."""

import asyncio
import random
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.soak import payload
from tests.soak.journal import Journal
from unified import RoleActor, RoleGroup
from unified.errors import (
    RemoteError,
    RouteLostError,
    RpcCancelledError,
    RpcNotFoundError,
    RpcTimeoutError,
    WorkerDiedError,
)

PATIENT_S = 30.0
"""Deadline of calls that should not miss it."""
LATE_S = 3.0
"""How long after its deadline a call may end, on a machine that does much else."""
EARLY_S = 0.05
SETTLED_S = 1.0
DIED = (WorkerDiedError, RouteLostError)


@dataclass
class Plan:
    """One call: how it is made, and how it may end besides in a death."""

    kind: str
    target: str
    timeout: float
    begin: Callable[[], Any]
    """Makes the call; a future, or a stream."""
    check: Callable[[Any], str] = lambda _: ""
    """What is wrong with the result, or nothing."""
    errors: tuple[type[BaseException], ...] = ()
    """Expected; one of them must come if `needs_error`."""
    needs_error: bool = False
    cancel_after: float | None = None
    close_after: int | None = None
    """Items of a stream after which it is closed."""
    was_cancelled: bool = False


@dataclass
class _Open:
    plan: Plan
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    num_callbacks: int = 0
    ended: float | None = None
    """When its future said so: a task of a busy event loop hears of it later, which is not the call's fault."""
    is_reported: bool = False
    error: str = ""


class Books:
    """Every call of this incarnation, from its beginning to its one end."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._open: dict[int, _Open] = {}
        self._settled: deque[tuple[float, _Open]] = deque()
        self._counts: Counter[str] = Counter()
        self._lateness = 0.0
        self._next = 0
        self._lock = threading.Lock()

    def begin(self, plan: Plan) -> int:
        with self._lock:
            self._next += 1
            self._open[self._next] = _Open(plan)
            return self._next

    @property
    def num_open(self) -> int:
        return len(self._open)

    def on_done(self, number: int, future: Any) -> None:
        """Count the ends that a future tells of."""
        entry = self._open[number]

        def count(_: Any) -> None:
            entry.num_callbacks += 1
            entry.ended = time.monotonic()

        future.add_done_callback(count)

    def end(self, number: int, outcome: str, wrong: str = "") -> None:
        now = time.monotonic()
        with self._lock:
            entry = self._open.pop(number)
            self._counts[f"{entry.plan.kind}/{outcome}"] += 1
            late = (entry.ended or now) - entry.began - entry.plan.timeout
            self._lateness = max(self._lateness, late)
            if "stream" not in entry.plan.kind:
                self._settled.append((now, entry))
        if outcome == "died":
            self._journal.write("died", entry.plan.target, entry.began_at, entry.error)
        if late > LATE_S and not entry.is_reported:
            wrong = wrong or f"it ended {late:.1f} s after its deadline"
        if wrong:
            self.complain(f"{entry.plan.kind} to {entry.plan.target}, {now - entry.began:.2f} s: {wrong}")

    def complain(self, what: str) -> None:
        self._journal.write("wrong", what)

    def look(self) -> None:
        """To be called now and then: finds calls that hang or ended twice, and writes the counts down."""
        now = time.monotonic()
        with self._lock:
            hung = [entry for entry in self._open.values() if now - entry.began > entry.plan.timeout + LATE_S]
            hung = [entry for entry in hung if not entry.is_reported and entry.ended is None]
            settled = []
            while self._settled and self._settled[0][0] < now - SETTLED_S:
                settled.append(self._settled.popleft()[1])
            counts, self._counts = self._counts, Counter()
            lateness, self._lateness = self._lateness, 0.0
        for entry in hung:
            entry.is_reported = True
            self._journal.write_stacks()
            self.complain(f"{entry.plan.kind} to {entry.plan.target} hangs: deadline {entry.plan.timeout:g} s")
        for entry in settled:
            if entry.num_callbacks != 1:
                self.complain(f"{entry.plan.kind} to {entry.plan.target} told its end {entry.num_callbacks} times")
        if counts:
            self._journal.write("calls", counts, round(lateness, 3))

    def outcome(self, entry_number: int, error: BaseException) -> tuple[str, str]:
        """The word for how a call failed, and what is wrong with that."""
        entry = self._open[entry_number]
        plan, elapsed = entry.plan, time.monotonic() - entry.began
        if isinstance(error, DIED) and not isinstance(error, RemoteError):
            entry.error = f"{type(error).__name__}: {error}"
            return "died", ""
        if isinstance(error, RpcTimeoutError) and not isinstance(error, RemoteError):
            if RpcTimeoutError not in plan.errors:
                return "timeout", f"no end within {plan.timeout:g} s: {error}"
            early = elapsed < plan.timeout - EARLY_S
            return "timeout", f"timed out after {elapsed:.3f} of {plan.timeout:.3f} s" if early else ""
        if isinstance(error, plan.errors):
            return "expected-error", ""
        return "error", f"{type(error).__mro__[:3]}: {error}"


class Caller:
    """Makes random calls and holds each against what it must be."""

    def __init__(self, books: Books, group: RoleGroup, seed: str) -> None:
        self.books = books
        self.group = group
        self.rng = random.Random(seed)
        self.shelf = payload.Shelf()

    def run(self, should_stop: Callable[[], bool]) -> None:
        """On a thread of its own, each call waited for."""
        while not should_stop():
            plan = self.plan()
            number = self.books.begin(plan)
            try:
                found = plan.begin()
                value = self._read(plan, found) if "stream" in plan.kind else self._wait(plan, number, found)
            except BaseException as error:
                self.books.end(number, *self.books.outcome(number, error))
            else:
                self.books.end(number, "result", self._judge(plan, value))
            time.sleep(self.rng.random() * 0.03)

    async def run_async(self, should_stop: Callable[[], bool]) -> None:
        """The same as a task of an event loop, each call awaited."""
        while not should_stop():
            plan = self.plan()
            number = self.books.begin(plan)
            try:
                found = plan.begin()
                if "stream" in plan.kind:
                    value = await self._read_async(plan, found)
                else:
                    self.books.on_done(number, found)
                    if plan.cancel_after is not None:
                        await asyncio.sleep(plan.cancel_after)
                        plan.was_cancelled = found.cancel()
                    value = await found
            except BaseException as error:
                self.books.end(number, *self.books.outcome(number, error))
            else:
                self.books.end(number, "result", self._judge(plan, value))
            await asyncio.sleep(self.rng.random() * 0.03)

    def _wait(self, plan: Plan, number: int, future: Any) -> Any:
        self.books.on_done(number, future)
        if plan.cancel_after is not None:
            time.sleep(plan.cancel_after)
            plan.was_cancelled = future.cancel()
        return future.result()

    def _read(self, plan: Plan, stream: Iterator[Any]) -> list[Any]:
        items = []
        for item in stream:
            items.append(item)
            if plan.close_after is not None and len(items) >= plan.close_after:
                stream.close()  # type: ignore[attr-defined]  # an RpcStream
                break
        return items

    async def _read_async(self, plan: Plan, stream: AsyncIterator[Any]) -> list[Any]:
        items = []
        async for item in stream:
            items.append(item)
            if plan.close_after is not None and len(items) >= plan.close_after:
                await stream.aclose()  # type: ignore[attr-defined]  # an RpcStream
                break
        return items

    def _judge(self, plan: Plan, value: Any) -> str:
        if plan.needs_error or plan.was_cancelled:
            return f"a result came, though it was cancelled or must fail: {value!r}"[:200]
        return plan.check(value)

    # -- what is called ----------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        kinds = list(KINDS)
        kind = self.rng.choices(kinds, weights=[KINDS[each][0] for each in kinds])[0]
        return KINDS[kind][1](self, kind, self.rng.choice(self.group))

    def _call(self, kind: str, actor: RoleActor, method: str, *args: Any, **more: Any) -> Plan:
        timeout = more.pop("timeout", PATIENT_S)
        return Plan(kind, actor.name, timeout, lambda: actor.call(method, *args, _timeout=timeout), **more)

    def echo(self, kind: str, actor: RoleActor) -> Plan:
        value = {"n": self.rng.random(), "text": "ü" * self.rng.randrange(50), "deep": [1, (2, [None, True])]}
        sent = [value, self.rng.randbytes(self.rng.randrange(2000))]
        return self._call(
            kind, actor, kind, sent, check=lambda got: "" if got == sent else f"{sent} came back as {got}"
        )

    def argument(self, kind: str, actor: RoleActor) -> Plan:
        nbytes, mark = payload.size(self.rng), self.rng.randrange(256)
        value = payload.make(nbytes, mark, self.rng.choice(["array", "tensor", "bytes"]))
        return self._call(kind, actor, "take", value, nbytes, mark, check=str)

    def outcome_of(self, kind: str, actor: RoleActor) -> Plan:
        nbytes, mark = payload.size(self.rng), self.rng.randrange(256)
        form = self.rng.choice(["array", "tensor", "bytes"])
        return self._call(
            kind, actor, "give", nbytes, mark, form, check=lambda got: self._look_at(got, nbytes=nbytes, mark=mark)
        )

    def _look_at(self, value: Any, *, nbytes: int, mark: int) -> str:
        return payload.complaint(value, nbytes, mark) or self.shelf.put(value, nbytes, mark)

    def fan(self, kind: str, _: RoleActor) -> Plan:
        nbytes, mark = payload.size(self.rng, 4 << 20), self.rng.randrange(256)
        value = payload.make(nbytes, mark, "array")

        def check(results: list[str]) -> str:
            return "; ".join(filter(None, results)) if len(results) == len(self.group) else f"{len(results)} results"

        return Plan(
            kind, "*", PATIENT_S, lambda: self.group.call("take", value, nbytes, mark, _timeout=PATIENT_S), check
        )

    def failing(self, kind: str, actor: RoleActor) -> Plan:
        return self._call(kind, actor, "fail", "on purpose", errors=(KeyError,), needs_error=True)

    def missing(self, kind: str, actor: RoleActor) -> Plan:
        return self._call(kind, actor, "no_such_method", errors=(RpcNotFoundError,), needs_error=True)

    def hurry(self, kind: str, actor: RoleActor) -> Plan:
        timeout = self.rng.uniform(0.05, 0.4)
        method = self.rng.choice(["nap", "nap_async"])
        return self._call(kind, actor, method, self.rng.uniform(0, 0.5), timeout=timeout, errors=(RpcTimeoutError,))

    def cancelled(self, kind: str, actor: RoleActor) -> Plan:
        method = self.rng.choice(["nap", "nap_async"])
        after = self.rng.uniform(0, 0.2)
        errors = (RpcCancelledError, asyncio.CancelledError)
        return self._call(kind, actor, method, self.rng.uniform(0, 0.5), cancel_after=after, errors=errors)

    def oneself(self, kind: str, _: RoleActor) -> Plan:
        from unified import current_worker

        own = next(actor for actor in self.group if actor.name == current_worker().actor_info.name)
        return self.echo("echo", own)

    def nested(self, kind: str, actor: RoleActor) -> Plan:
        inner = self.rng.choice(self.group)
        return self._call(kind, actor, "ask", inner.name, 7, check=lambda got: "" if got in (8, "died") else repr(got))

    def stream(self, kind: str, actor: RoleActor) -> Plan:
        count = self.rng.randrange(300)
        nbytes = payload.size(self.rng, 1 << 20) if self.rng.random() < 0.2 else 0
        closes = kind == "stream-closed" and count > 0
        close_after = self.rng.randrange(1, count + 1) if closes else None
        wanted = count if close_after is None else close_after

        def check(items: list[Any]) -> str:
            if [item[0] for item in items] != list(range(wanted)):
                return f"items {[item[0] for item in items]} of {wanted}"
            return next(filter(None, (payload.complaint(data, nbytes, place % 256) for place, data in items)), "")

        method = self.rng.choice(["count", "count_async"])
        return Plan(
            kind,
            actor.name,
            PATIENT_S,
            lambda: actor.stream(method, count, nbytes, _timeout=PATIENT_S),
            check,
            close_after=close_after,
        )


KINDS: dict[str, tuple[int, Callable[[Caller, str, RoleActor], Plan]]] = {
    "echo": (30, Caller.echo),
    "echo_inline": (15, Caller.echo),
    "echo_async": (12, Caller.echo),
    "argument": (8, Caller.argument),
    "result": (8, Caller.outcome_of),
    "fan": (3, Caller.fan),
    "fail": (4, Caller.failing),
    "missing": (2, Caller.missing),
    "hurry": (5, Caller.hurry),
    "cancel": (4, Caller.cancelled),
    "self": (2, Caller.oneself),
    "nested": (4, Caller.nested),
    "stream": (10, Caller.stream),
    "stream-closed": (4, Caller.stream),
}
"""What is called, and how often beside the others."""
