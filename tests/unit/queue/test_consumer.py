"""A take whose time is over before the owner was heard: whatever the owner handed out meanwhile comes with the next."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from unified.errors import QueueNotFoundError, RouteLostError, RpcError, RpcTimeoutError
from unified.protocol.records import WorkerIncarnation
from unified.queue.consumer import QueueConsumer
from unified.queue.core.messages import Outcome
from unified.queue.items import pack
from unified.queue.owner_lookup import GetQuestion, OwnerLookup
from unified.worker.progress import QUEUE_USES

DEADLINE_S = 300.0


class ScriptedOwner:
    """Answers takes as it was told to, and remembers what was asked."""

    is_here = True
    holder = WorkerIncarnation("a", 0)

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.asked: list[tuple[int, int]] = []
        """Number and received of each take."""
        self.told: list[tuple[str, Any]] = []

    def get(self, question: GetQuestion, until: float | None) -> Any:
        _, _, number, received, _, _ = question
        self.asked.append((number, received))
        return self._says()

    def tell(self, verb: str, *args: Any, until: float | None = None) -> Any:
        self.told.append((verb, args[2] if args else None))
        return self._says()

    def _says(self) -> Any:
        answer = self.script.pop(0) if self.script else None
        if isinstance(answer, RpcError):
            raise answer
        return answer


def taker_of(owner: ScriptedOwner) -> QueueConsumer:
    """A taker whose owner is always found, and never lost for good."""
    nothing = lambda *_: None  # noqa: E731
    lookup = SimpleNamespace(
        handle=1,
        queue="q",
        endpoint=owner,
        failed=nothing,
        pause=nothing,
        detach=nothing,
        check_process=nothing,
        end_consumer=nothing,
        owner_timeout_s=DEADLINE_S,
    )
    lookup.silent = lambda holder, *_: QueueNotFoundError(f"{holder.worker} is silent")
    return QueueConsumer(cast(OwnerLookup, lookup))


def test_a_take_that_was_not_heard_is_asked_again_under_its_number() -> None:
    owner = ScriptedOwner([pack("a")], RouteLostError("the owner died"), [pack("b")], Outcome.WAITING, [pack("c")])
    taker = taker_of(owner)
    assert taker.take(1, 0.0) == ["a"]
    assert taker.take(1, 0.0) == []
    assert taker.take(1, 0.0) == ["b"], "handed out by the incarnation that died, or by the next"
    assert taker.take(1, 0.0) == [], "the owner said so itself"
    assert taker.take(1, 0.0) == ["c"]
    assert owner.asked == [(1, 0), (2, 1), (2, 1), (3, 2), (4, 3)]


def test_what_was_taken_before_can_still_be_acknowledged() -> None:
    owner = ScriptedOwner([pack("a"), pack("b")], RouteLostError("the owner died"))
    taker = taker_of(owner)
    assert taker.take(2, 0.0) == ["a", "b"]
    assert taker.take(2, 0.0) == []
    taker.done(None)
    assert owner.told == [("done", 1)]


def test_a_take_that_failed_is_not_acknowledged_unseen() -> None:
    owner = ScriptedOwner([pack("a")], RpcError("the answer cannot be read here"), [pack("b")])
    taker = taker_of(owner)
    assert taker.take(1, None) == ["a"]
    taker._lookup.failed = _raise  # type: ignore[method-assign]
    with pytest.raises(RpcError, match="cannot be read here"):
        taker.take(1, None)
    taker.done(None)
    taker.give_back()
    assert owner.told == []
    assert taker.take(1, None) == ["b"]
    assert owner.asked == [(1, 0), (2, 1), (3, 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What takers see of time."""
    now = [1000.0]
    monkeypatch.setattr("unified.queue.consumer.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_takes_with_little_time_from_an_owner_that_is_silent_do_not_go_on_for_ever(clock: list[float]) -> None:
    silent = RpcTimeoutError("no answer")
    owner = ScriptedOwner(silent, silent, Outcome.WAITING, silent, silent, silent)
    taker = taker_of(owner)
    for _ in range(5):
        assert taker.take(1, 0.0) == []
        clock[0] += DEADLINE_S / 2 + 1
    with pytest.raises(QueueNotFoundError, match="a is silent"):
        taker.take(1, 0.0)
    assert [number for number, _ in owner.asked] == [1, 1, 1, 2, 2, 2]


def test_an_owner_that_does_not_answer_is_asked_for_as_long_as_one_would_wait_for_an_owner(clock: list[float]) -> None:
    silent = RpcTimeoutError("no answer")
    owner = ScriptedOwner(silent, {"depth": 1}, silent, silent, silent)
    taker = taker_of(owner)

    def pause(*_: Any) -> None:
        clock[0] += DEADLINE_S / 2

    taker._lookup.pause = pause  # type: ignore[assignment,method-assign]
    assert taker.ask("stats") == {"depth": 1}
    with pytest.raises(QueueNotFoundError, match="a is silent"):
        taker.ask("stats")
    assert not owner.script


def test_the_wait_for_an_owner_begins_anew_with_each_time_that_it_is_missed(clock: list[float]) -> None:
    owner = ScriptedOwner([pack("a")], [pack("b")])
    taker = taker_of(owner)
    lookup: Any = taker._lookup

    def attach(until: float | None) -> object:
        if not lookup.may_be_found:
            clock[0] = until or 0.0
            raise QueueNotFoundError("nobody has it")
        lookup.endpoint = owner
        return owner

    lookup.attach = attach
    for item in ("a", "b"):
        lookup.endpoint, lookup.may_be_found = None, False
        for _ in range(3):
            assert taker.take(1, 0.5) == []
            clock[0] += 99
        lookup.may_be_found = True
        assert taker.take(1, 0.5) == [item]
        clock[0] += 1000
    lookup.endpoint, lookup.may_be_found = None, False
    assert taker.take(1, 0.5) == []
    clock[0] += 301
    with pytest.raises(QueueNotFoundError):
        taker.take(1, 0.5)


def _raise(endpoint: object, error: RpcError) -> None:
    raise error


def test_only_what_the_owner_has_said_is_a_wait() -> None:
    seen: list[int] = []
    owner = ScriptedOwner(Outcome.UNKNOWN, RouteLostError("it broke"), Outcome.WAITING, Outcome.WAITING, [pack("a")])
    ask, waits = owner.get, QUEUE_USES[threading.current_thread()]

    def get(question: GetQuestion, until: float | None) -> Any:
        seen.append(waits["gets", "q"])
        return ask(question, until)

    owner.get = get  # type: ignore[method-assign]
    assert taker_of(owner).take(1, None) == ["a"]
    assert (seen, waits["gets", "q"]) == ([0, 0, 0, 1, 2], 0)
