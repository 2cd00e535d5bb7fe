"""Every call ends exactly once, and for a reason that it can name."""

from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.invariants.calls import check
from unified.bus.calls.pending import (
    Action,
    BusClosed,
    CallCancelled,
    CallTable,
    DeliveryFailed,
    DropPeer,
    Event,
    FailCall,
    LinkLost,
    MailLost,
    SendCall,
    SendCancel,
    SendFailed,
    SendWaiting,
    TimePassed,
)
from unified.errors import (
    BusOverloadedError,
    RouteLostError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    WorkerDiedError,
)
from unified.protocol.records import DirectoryEntry, Inbox, Reachability


class News(NamedTuple):
    """An entry of the directory came."""

    entry: DirectoryEntry


def news(state: str, incarnation: int = 0, worker: str = "b", reason: str = "") -> News:
    inbox = Inbox(inbox_id=f"{worker}{incarnation}") if state == "alive" else None
    entry = DirectoryEntry(
        worker=worker, incarnation=incarnation, state=Reachability(state), inbox=inbox, node="n1", reason=reason
    )
    return News(entry)


class Made(NamedTuple):
    """A caller wants method `m`."""

    call_id: int = 1
    timeout_s: float | None = None
    target: str = "b"
    incarnation: int | None = None


Told = Event | Made | News


def tell(table: CallTable, now: float, event: Told) -> list[Action | SendCall]:
    """An event; or that a call is made, with what follows from it as actions too."""
    if isinstance(event, News):
        return list(table.learn(now, [event.entry])[1])
    if not isinstance(event, Made):
        return list(table.step(now, event))
    try:
        inbox = table.make(now, event.call_id, event.target, "m", event.timeout_s, event.incarnation)
    except RpcError as error:
        return [FailCall(call_id=event.call_id, error=error)]
    return [] if inbox is None else [SendCall(call_id=event.call_id, inbox=inbox, timeout_s=event.timeout_s)]


class Story:
    def __init__(self, *events: Told) -> None:
        self.table = CallTable()
        self.now = 100.0
        for event in events:
            self.tell(event)

    def tell(self, event: Told, after_s: float = 0.0) -> list[Action | SendCall]:
        """What is to be done; calls that may go are sent at once."""
        self.now += after_s
        done: list[Action | SendCall] = []
        for action in tell(self.table, self.now, event):
            done += self.release(action.target) if isinstance(action, SendWaiting) else [action]
        assert check(self.table) == []
        return done

    def release(self, target: str = "b") -> list[SendCall]:
        released: list[SendCall] = []
        while sent := self.table.release(self.now, target):
            released += sent
        return released

    def answer(self, sender: str, is_last: bool = True) -> bool:
        """Whether an answer to call 1 is what is waited for."""
        is_awaited = self.table.answer(1, sender, is_last)
        assert check(self.table) == []
        return is_awaited

    def fails(self, event: Told, after_s: float = 0.0) -> RpcError:
        (action,) = (each for each in self.tell(event, after_s) if isinstance(each, FailCall))
        return action.error


def test_call_is_sent_and_its_answer_accepted_once() -> None:
    story = Story(news("alive"))
    assert story.tell(Made(timeout_s=5)) == [SendCall(call_id=1, inbox=Inbox(inbox_id="b0"), timeout_s=5)]
    assert story.answer("b0")
    assert not story.answer("b0")
    assert story.table.next_deadline is None


def test_answer_of_another_incarnation_is_ignored() -> None:
    story = Story(news("alive"), Made())
    assert not story.answer("b1")
    assert len(story.table._open) == 1


def test_call_to_an_unknown_worker_waits_and_is_sent_with_what_is_left() -> None:
    story = Story()
    assert story.tell(Made(timeout_s=5)) == []
    assert story.tell(news("alive"), after_s=2) == [SendCall(call_id=1, inbox=Inbox(inbox_id="b0"), timeout_s=3)]


def test_call_between_two_incarnations_waits_for_the_next() -> None:
    story = Story(news("alive"), news("dead"))
    assert story.tell(Made()) == []
    assert story.tell(news("alive", 1)) == [SendCall(call_id=1, inbox=Inbox(inbox_id="b1"), timeout_s=None)]


def test_death_fails_what_was_sent_and_names_who_died_and_why() -> None:
    story = Story(news("alive"), Made())
    fail, drop = story.tell(news("dead", reason="killed by SIGKILL."))
    assert drop == DropPeer(inbox_id="b0")
    assert isinstance(fail, FailCall)
    assert isinstance(fail.error, WorkerDiedError)
    assert str(fail.error) == (
        "worker b (incarnation 0 on node n1) died before it answered 'm': killed by SIGKILL. "
        "`unified explain b` says more."
    )


@pytest.mark.parametrize(
    ("event", "error"),
    [(news("alive", 1), WorkerDiedError), (DeliveryFailed(call_id=1, code="overloaded"), BusOverloadedError)],
)
def test_new_incarnation_or_an_overloaded_relay_fails_the_call(event: Told, error: type[RpcError]) -> None:
    assert isinstance(Story(news("alive"), Made()).fails(event), error)


def test_ended_worker_fails_waiting_and_new_calls_at_once() -> None:
    story = Story(Made())
    assert isinstance(story.fails(news("ended", reason="the job is stopping")), WorkerDiedError)
    error = story.fails(Made(2))
    assert isinstance(error, WorkerDiedError)
    assert "the job is stopping" in str(error)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "it has not started yet"),
        ([news("alive", 2), news("dead", 2, reason="r")], r"its incarnation 2 ended \(r\) and the next has not begun"),
        ([news("alive", 2)], "incarnation 2 has had the call for 5 s"),
    ],
)
def test_deadline_says_what_was_awaited(events: list[News], state: str) -> None:
    story = Story(*events, Made(timeout_s=5))
    assert story.table.next_deadline == 105
    error = story.fails(TimePassed(), after_s=5)
    assert isinstance(error, RpcTimeoutError)
    with pytest.raises(RpcTimeoutError, match=f"worker b did not answer 'm' within 5 s: {state}"):
        raise error


@pytest.mark.parametrize("event", [CallCancelled(call_id=1), TimePassed()])
def test_callee_is_told_when_nobody_waits_any_more(event: Event) -> None:
    story = Story(news("alive"), Made(timeout_s=1))
    assert SendCancel(call_id=1, inbox=Inbox(inbox_id="b0")) in story.tell(event, after_s=1)
    assert not story.answer("b0"), "it is late"


def test_waiting_call_is_cancelled_without_telling_anybody() -> None:
    story = Story(Made())
    (action,) = story.tell(CallCancelled(call_id=1))
    assert isinstance(action, FailCall)
    assert isinstance(action.error, RpcCancelledError)
    assert story.tell(CallCancelled(call_id=1)) == []


def test_call_that_the_relay_did_not_deliver_is_sent_again_ever_more_slowly() -> None:
    story = Story(news("alive"), Made(timeout_s=100))
    waits = []
    for _ in range(8):
        assert story.tell(DeliveryFailed(call_id=1, code="unknown-target")) == []
        due = story.table.next_deadline
        assert due is not None
        waits.append(round(due - story.now, 3))
        (again,) = story.tell(TimePassed(), after_s=due - story.now)
        assert isinstance(again, SendCall)
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    with pytest.raises(RpcTimeoutError, match="the relay has not known it in 8 attempts"):
        raise story.fails(TimePassed(), after_s=100)


def test_calls_wait_behind_earlier_ones_that_are_being_sent() -> None:
    story = Story(Made(1), Made(2))
    assert tell(story.table, story.now, news("alive")) == [SendWaiting(target="b")]
    assert story.tell(Made(3)) == [], "the first two have not gone"
    assert [each.call_id for each in story.table.release(story.now, "b")] == [1, 2, 3]
    assert story.tell(Made(4, timeout_s=1)) == [], "they are being sent"
    assert story.tell(Made(5)) == []
    with pytest.raises(RpcTimeoutError, match="calls that were made before it are still to be sent"):
        raise story.fails(TimePassed(), after_s=1)
    assert [each.call_id for each in story.release()] == [5]
    assert [type(each) for each in story.tell(Made(6))] == [SendCall]


def test_call_that_the_relay_gave_back_has_its_old_place_again() -> None:
    story = Story(news("alive"), Made(1), Made(2), Made(3))
    for call_id in (3, 1):
        assert story.tell(DeliveryFailed(call_id=call_id, code="unknown-target")) == []
    assert story.tell(Made(4)) == [], "earlier ones are to go first"
    again = story.tell(TimePassed(), after_s=0.02)
    assert [each.call_id for each in again if isinstance(each, SendCall)] == [1, 3, 4]
    assert [type(each) for each in story.tell(Made(5))] == [SendCall]


def test_call_that_the_relay_gave_back_ends_with_the_incarnation_that_it_was_for() -> None:
    story = Story(news("alive"), Made(1))
    story.tell(DeliveryFailed(call_id=1, code="unknown-target"))
    assert story.tell(Made(2)) == []
    assert isinstance(story.fails(news("dead")), WorkerDiedError)
    assert story.tell(TimePassed(), after_s=5) == []
    never_sent_to_the_old_one = SendCall(call_id=2, inbox=Inbox(inbox_id="b1"), timeout_s=None)
    assert story.tell(news("alive", 1)) == [never_sent_to_the_old_one]


def test_calls_that_waited_are_sent_to_the_incarnation_that_is_there() -> None:
    story = Story(Made(1))
    assert tell(story.table, story.now, news("alive")) == [SendWaiting(target="b")]
    tell(story.table, story.now, news("dead"))
    assert story.release() == []
    assert tell(story.table, story.now, news("alive", 1)) == [SendWaiting(target="b")]
    tell(story.table, story.now, news("alive", 2))
    assert [each.inbox.inbox_id for each in story.release()] == ["b2"]


def test_call_for_one_incarnation_goes_to_no_other() -> None:
    story = Story(news("alive"))
    assert [type(each) for each in story.tell(Made(1, incarnation=0))] == [SendCall]
    assert story.tell(Made(2, incarnation=1)) == [], "it has not begun"
    assert [type(each) for each in story.tell(Made(3))] == [SendCall], "which has not to wait behind that"
    story.tell(news("dead"))
    assert story.tell(Made(4)) == []
    sent = [each for each in story.tell(news("alive", 1)) if isinstance(each, SendCall)]
    assert [(each.call_id, each.inbox.inbox_id) for each in sent] == [(2, "b1"), (4, "b1")]


def test_call_for_an_incarnation_that_is_over_is_refused() -> None:
    story = Story(news("alive", 1))
    error = story.fails(Made(incarnation=0))
    assert isinstance(error, WorkerDiedError)
    assert not error.is_final
    assert str(error) == "worker b (incarnation 0) died before 'm' was called."
    assert len(story.table._open) == 0


@pytest.mark.parametrize("passed", [news("dead", 2, reason="r"), news("alive", 3)])
def test_call_for_an_incarnation_that_passes_by_ends_with_it(passed: News) -> None:
    story = Story(Made(incarnation=2), Made(2))
    assert isinstance(story.fails(passed), WorkerDiedError)
    assert len(story.table._open) == 1


def test_deadline_of_a_call_for_an_incarnation_that_did_not_begin() -> None:
    story = Story(news("alive"), Made(timeout_s=5, incarnation=1))
    with pytest.raises(RpcTimeoutError, match="within 5 s: its incarnation 1 has not begun"):
        raise story.fails(TimePassed(), after_s=5)


def test_all_calls_of_an_incarnation_end_before_the_next_is_called() -> None:
    story = Story(news("alive"), Made(1), Made(2, incarnation=0))
    story.tell(DeliveryFailed(call_id=1, code="unknown-target"))
    story.tell(Made(3))
    actions = tell(story.table, story.now, news("alive", 1))
    assert [type(each) for each in actions] == [FailCall, FailCall, DropPeer, SendWaiting]
    assert [each.call_id for each in story.release()] == [3]


def test_call_that_cannot_be_sent_ends_with_that_error() -> None:
    error = RpcError("no route")
    assert Story(news("alive"), Made()).fails(SendFailed(call_id=1, error=error)) is error


def test_closing_ends_all_and_refuses_more() -> None:
    story = Story(news("alive"), Made(1), Made(2, 5.0))
    ended = story.tell(BusClosed(reason="closed"))
    assert [type(each.error) for each in ended if isinstance(each, FailCall)] == [RpcCancelledError] * 2
    assert isinstance(story.fails(Made(3)), RpcCancelledError)
    assert story.table.next_deadline is None


@pytest.mark.parametrize(
    "event",
    [
        CallCancelled(call_id=9),
        DeliveryFailed(call_id=9, code="unknown-target"),
        SendFailed(call_id=9, error=RpcError("")),
        MailLost(call_id=9, reason="closed"),
        TimePassed(),
    ],
)
def test_events_about_unknown_calls_do_nothing(event: Event) -> None:
    assert Story().tell(event) == []


@pytest.mark.parametrize("loss", [LinkLost(inbox_id="b0", reason="closed"), MailLost(call_id=1, reason="closed")])
def test_broken_way_waits_for_the_news_of_a_death_and_then_for_no_more(loss: Event) -> None:
    for dies in (True, False):
        story = Story(news("alive"), Made())
        assert story.answer("b0", is_last=False)
        assert story.tell(loss) == []
        if dies:
            (failed, _) = story.tell(news("dead", reason="killed by SIGKILL"))
            assert isinstance(failed, FailCall)
            assert isinstance(failed.error, WorkerDiedError)
        else:
            story.now += 1.9
            assert story.tell(TimePassed()) == []
            story.now += 0.2
            failed, cancelled = story.tell(TimePassed())
            assert isinstance(failed, FailCall)
            assert isinstance(failed.error, RouteLostError)
            assert isinstance(cancelled, SendCancel), "if it lives, it need not go on"


def test_stream_stays_open_until_its_last_answer() -> None:
    story = Story(news("alive"), Made(timeout_s=10))
    assert story.answer("b0", is_last=False)
    assert len(story.table._open) == 1
    assert story.answer("b0")
    assert len(story.table._open) == 0


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: no call ends twice, none is lost, none overtakes, invariants hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CallTable()
        self.now = 0.0
        self.made = 0
        self.ended: list[int] = []
        self.to_send: dict[str, list[SendCall]] = {}
        """By worker, what the thread that sends calls which waited has still to send."""
        self.newest_sent = {"a": 0, "b": 0}
        self.given_back: set[int] = set()
        self.bound: dict[int, int] = {}
        """Incarnation that a call is for, or was sent to."""
        self.early: set[int] = set()
        """Calls for an incarnation that had not begun, which others may overtake."""

    def tell(self, event: Told) -> None:
        actions = tell(self.table, self.now, event)
        if isinstance(event, News):
            others = [not isinstance(each, FailCall) for each in actions]
            assert others == sorted(others), "all that end have ended before anything else is done"
        for action in actions:
            if isinstance(action, FailCall):
                self.ended.append(action.call_id)
            if isinstance(action, SendCall):
                self.send(action)
            if isinstance(action, SendWaiting):
                assert action.target not in self.to_send
                self.to_send[action.target] = []

    def send(self, sent: SendCall) -> None:
        worker = sent.inbox.inbox_id[0]
        assert int(sent.inbox.inbox_id[1]) == self.bound.setdefault(sent.call_id, int(sent.inbox.inbox_id[1]))
        if sent.call_id in self.early:
            return
        if sent.call_id not in self.given_back:
            assert sent.call_id > self.newest_sent[worker]
            self.newest_sent[worker] = sent.call_id

    @rule(worker=st.sampled_from("ab"))
    def send_one_that_waited(self, worker: str) -> None:
        if worker not in self.to_send:
            return
        if not self.to_send[worker]:
            self.to_send[worker] = self.table.release(self.now, worker)
        if not self.to_send[worker]:
            del self.to_send[worker]
            return
        self.send(self.to_send[worker].pop(0))

    @rule(
        worker=st.sampled_from("ab"), timeout_s=st.none() | st.floats(0, 10), incarnation=st.none() | st.integers(0, 3)
    )
    def call(self, worker: str, timeout_s: Any, incarnation: Any) -> None:
        self.made += 1
        if incarnation is not None:
            self.bound[self.made] = incarnation
            if self.table.directory.reachable(worker) != Inbox(inbox_id=f"{worker}{incarnation}"):
                self.early.add(self.made)
        self.tell(Made(self.made, timeout_s, worker, incarnation))

    @rule(
        worker=st.sampled_from("ab"), incarnation=st.integers(0, 3), state=st.sampled_from(["alive", "dead", "ended"])
    )
    def hear(self, worker: str, incarnation: int, state: str) -> None:
        self.tell(news(state, incarnation, worker))

    @rule(call_id=st.integers(1, 8), worker=st.sampled_from("ab"), incarnation=st.integers(0, 3), is_last=st.booleans())
    def answer(self, call_id: int, worker: str, incarnation: int, is_last: bool) -> None:
        if self.table.answer(call_id, f"{worker}{incarnation}", is_last) and is_last:
            self.ended.append(call_id)

    @rule(worker=st.sampled_from("ab"), incarnation=st.integers(0, 3))
    def lose_link(self, worker: str, incarnation: int) -> None:
        self.tell(LinkLost(inbox_id=f"{worker}{incarnation}", reason="closed"))

    @rule(call_id=st.integers(1, 8))
    def cancel(self, call_id: int) -> None:
        self.tell(CallCancelled(call_id=call_id))

    @rule(call_id=st.integers(1, 8), code=st.sampled_from(["unknown-target", "overloaded"]))
    def give_back(self, call_id: int, code: Any) -> None:
        self.given_back.add(call_id)
        self.tell(DeliveryFailed(call_id=call_id, code=code))

    @rule(call_id=st.integers(1, 8))
    def cut(self, call_id: int) -> None:
        self.tell(MailLost(call_id=call_id, reason="closed"))

    @rule(seconds=st.floats(0, 5))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tell(TimePassed())

    @invariant()
    def every_call_is_open_or_ended_once(self) -> None:
        assert check(self.table) == []
        assert len(self.ended) == len(set(self.ended))
        assert len(self.ended) + len(self.table._open) == self.made


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30)
