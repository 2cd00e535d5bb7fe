"""Who may run now, who starts next, which method is short, and which calls have come before."""

from hypothesis import given
from hypothesis import strategies as st

from unified.bus.calls.concurrency import ConcurrencyLimit, InlinePolicy, SenderOrder
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.inbound import InboundCall


def call(call_id: int, sender: str = "a", method: str = "m", chain: list[int] | None = None) -> InboundCall:
    return InboundCall(call_id, sender, "a_1-0_1-0", method, None, b"", [], chain=chain or [])


@given(size=st.integers(1, 4), ends=st.lists(st.integers(0, 9), max_size=40), count=st.integers(0, 20))
def test_limit_admits_in_order_and_never_too_many(size: int, ends: list[int], count: int) -> None:
    limit = ConcurrencyLimit[InboundCall]("m", size)
    calls = [call(i) for i in range(count)]
    started = [each for each in calls if limit.enter(each)]
    for pick in ends:
        assert len(limit.running) <= size
        if limit.running:
            started += limit.leave(limit.running[pick % len(limit.running)])
    while limit.running:
        started += limit.leave(limit.running[0])
    assert started == calls
    assert not limit.waiting


def test_call_given_up_in_line_lets_the_next_through() -> None:
    limit = ConcurrencyLimit[InboundCall]("m", 1)
    first, second, third = call(1), call(2), call(3)
    assert [limit.enter(each) for each in (first, second, third)] == [True, False, False]
    assert limit.leave(second) == []
    assert limit.leave(first) == [third]


def test_cycle_is_seen_only_while_somebody_waits_in_it() -> None:
    limit = ConcurrencyLimit[InboundCall]("m", 1)
    holder = call(1)
    assert limit.enter(holder)
    own, other = call(2, "b", chain=[holder.token]), call(3, "c", chain=[77])
    assert not limit.enter(own)
    assert not limit.enter(other)
    assert limit.deadlocked() == []  # its handler may return without waiting
    holder.waits = (RpcFuture(),)
    assert limit.deadlocked() == [own]


def test_limit_for_two_is_hopeless_only_when_both_wait_for_the_call() -> None:
    limit = ConcurrencyLimit[InboundCall]("m", 2)
    one, two = call(1), call(2)
    limit.enter(one)
    limit.enter(two)
    limit.enter(call(3, chain=[one.token]))
    limit.enter(inner := call(4, chain=[one.token, two.token]))
    one.waits = two.waits = (RpcFuture(),)
    assert limit.deadlocked() == [inner]


@given(st.lists(st.sampled_from(["start", "come"]), max_size=30))
def test_one_after_the_other(moves: list[str]) -> None:
    order = SenderOrder[InboundCall]()
    came = handed = 0
    out: list[InboundCall] = []
    for move in [*moves, *["start"] * len(moves)]:  # in the end all have started
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
    assert [each.call_id for each in out] == list(range(came))
    assert order.is_free(call(0))


def test_inline_policy_has_to_be_shown_again_after_a_long_run() -> None:
    policy = InlinePolicy()
    for _ in range(4):
        assert not policy.is_short
        policy.took(0.0001)
    assert policy.is_short
    policy.took(0.5)
    assert not policy.is_short
    for _ in range(15):
        policy.took(0.0001)
    assert not policy.is_short
    policy.took(0.0001)
    assert policy.is_short


def test_inline_policy_forgives_a_long_call_after_many_short_ones() -> None:
    policy = InlinePolicy()
    for _ in range(InlinePolicy.MANY):
        policy.took(0.0001)
    policy.took(0.5)
    assert policy.is_short
    for _ in range(InlinePolicy.MANY - 1):
        policy.took(0.0001)
    policy.took(0.5)
    assert not policy.is_short
