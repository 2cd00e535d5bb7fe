"""Who may run now, who starts next, which method is short, and which calls have come before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unified.bus.calls.concurrency import Gate, Pace, StartOrder
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.inbound import InboundCall


def call(call_id: int, sender: str = "a", method: str = "m", chain: list[int] | None = None) -> InboundCall:
    return InboundCall(call_id, sender, "a_1-0_1-0", method, None, b"", [], chain=chain or [])


@given(limit=st.integers(1, 4), ends=st.lists(st.integers(0, 9), max_size=40), count=st.integers(0, 20))
def test_gate_admits_in_order_and_never_too_many(limit: int, ends: list[int], count: int) -> None:
    gate = Gate[InboundCall]("m", limit)
    calls = [call(i) for i in range(count)]
    started = [each for each in calls if gate.enter(each)]
    for pick in ends:
        assert len(gate.running) <= limit
        if gate.running:
            started += gate.leave(gate.running[pick % len(gate.running)])
    while gate.running:
        started += gate.leave(gate.running[0])
    assert started == calls
    assert not gate.waiting


def test_call_given_up_in_line_lets_the_next_through() -> None:
    gate = Gate[InboundCall]("m", 1)
    first, second, third = call(1), call(2), call(3)
    assert [gate.enter(each) for each in (first, second, third)] == [True, False, False]
    assert gate.leave(second) == []
    assert gate.leave(first) == [third]


def test_circle_is_seen_only_while_somebody_waits_in_it() -> None:
    gate = Gate[InboundCall]("m", 1)
    holder = call(1)
    assert gate.enter(holder)
    own, other = call(2, "b", chain=[holder.token]), call(3, "c", chain=[77])
    assert not gate.enter(own)
    assert not gate.enter(other)
    assert gate.hopeless() == []  # its handler may return without waiting
    holder.waits = (RpcFuture(),)
    assert gate.hopeless() == [own]


def test_gate_for_two_is_hopeless_only_when_both_wait_for_the_call() -> None:
    gate = Gate[InboundCall]("m", 2)
    one, two = call(1), call(2)
    gate.enter(one)
    gate.enter(two)
    gate.enter(call(3, chain=[one.token]))
    gate.enter(inner := call(4, chain=[one.token, two.token]))
    one.waits = two.waits = (RpcFuture(),)
    assert gate.hopeless() == [inner]


@given(st.lists(st.sampled_from(["start", "come"]), max_size=30))
def test_one_after_the_other(moves: list[str]) -> None:
    order = StartOrder[InboundCall]()
    came = handed = 0
    out: list[InboundCall] = []
    for move in moves:
        if move == "come":
            each = call(came)
            came += 1
            if order.line_up(each):
                out.append(each)
        elif handed < len(out):
            following = order.started(out[handed])
            handed += 1
            if following is not None:
                out.append(following)
        assert len(out) - handed <= 1
    while handed < len(out):
        following = order.started(out[handed])
        handed += 1
        out += [following] if following is not None else []
    assert [each.call_id for each in out] == list(range(came))
    assert order.is_free(call(0))


def test_pace_has_to_be_shown_again_after_a_long_run() -> None:
    pace = Pace()
    for _ in range(4):
        assert not pace.is_short
        pace.took(0.0001)
    assert pace.is_short
    pace.took(0.5)
    assert not pace.is_short
    for _ in range(15):
        pace.took(0.0001)
    assert not pace.is_short
    pace.took(0.0001)
    assert pace.is_short


def test_pace_forgives_a_long_call_after_many_short_ones() -> None:
    pace = Pace()
    for _ in range(Pace.MANY):
        pace.took(0.0001)
    pace.took(0.5)
    assert pace.is_short
    for _ in range(Pace.MANY - 1):
        pace.took(0.0001)
    pace.took(0.5)
    assert not pace.is_short
