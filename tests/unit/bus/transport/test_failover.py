"""When a peer on another host is written to directly, when through the relay, and when what was sent is given up."""

from hypothesis import given
from hypothesis import strategies as st

from unified.bus.transport.failover import CONNECT_WITHIN_S, GIVE_UP_AFTER_S, QUIET_S, DirectOrRelay, State


def state(passage: DirectOrRelay) -> State:
    return passage.state


def test_a_peer_that_answers_is_written_to_directly() -> None:
    passage = DirectOrRelay(10.0, has_relay=True)
    assert state(passage) == "connecting"
    passage.connected()
    assert state(passage) == "up"
    passage.passed(10.0 + 100 * GIVE_UP_AFTER_S)
    assert state(passage) == "up", "time does no harm to a connection"


def test_attempts_that_fail_decide_nothing_before_the_time_has_come() -> None:
    passage = DirectOrRelay(0.0, has_relay=True)
    for _ in range(5):
        passage.disconnected()
        passage.passed(0.9 * CONNECT_WITHIN_S)
    assert state(passage) == "connecting"
    passage.passed(CONNECT_WITHIN_S)
    assert state(passage) == "relayed"


def test_without_a_relay_a_peer_is_waited_for_longer_and_then_given_up() -> None:
    passage = DirectOrRelay(0.0, has_relay=False)
    passage.passed(0.9 * GIVE_UP_AFTER_S)
    assert state(passage) == "connecting"
    passage.passed(GIVE_UP_AFTER_S)
    assert state(passage) == "broken"


def test_what_was_sent_on_a_connection_that_broke_is_given_up_at_once() -> None:
    passage = DirectOrRelay(0.0, has_relay=True)
    passage.connected()
    passage.disconnected()
    assert state(passage) == "broken"
    passage.connected()
    passage.passed(1000.0)
    assert state(passage) == "broken"


def test_the_direct_way_is_taken_again_once_the_relay_was_not_used_for_a_while() -> None:
    passage = DirectOrRelay(0.0, has_relay=True)
    passage.passed(CONNECT_WITHIN_S)
    passage.connected()
    assert state(passage) == "relayed", "direct messages might overtake those that the relay has"
    passage.used_relay(10.0)
    passage.passed(10.0 + 0.9 * QUIET_S)
    assert state(passage) == "relayed"
    passage.passed(10.0 + QUIET_S)
    assert state(passage) == "up"


def test_a_connection_that_came_and_went_is_not_taken() -> None:
    passage = DirectOrRelay(0.0, has_relay=True, is_relayed=True)
    passage.connected()
    passage.disconnected()
    passage.passed(100.0)
    assert state(passage) == "relayed"


_EVENTS = st.one_of(
    st.sampled_from(["connected", "disconnected"]),
    st.tuples(st.sampled_from(["passed", "used_relay"]), st.floats(0, 9)),
)


@given(has_relay=st.booleans(), events=st.lists(_EVENTS, max_size=30))
def test_any_events_in_any_order(has_relay: bool, events: list[str | tuple[str, float]]) -> None:
    """Nothing waits for ever, nothing goes through a relay that is not there, and what is given up stays so."""
    passage, now, is_connected = DirectOrRelay(0.0, has_relay=has_relay), 0.0, False
    for event in events:
        before = passage.state
        if isinstance(event, str):
            getattr(passage, event)()
            is_connected = event == "connected"
        else:
            name, seconds = event
            now += seconds
            getattr(passage, name)(now)
        assert passage.state != "relayed" or has_relay
        assert before != "broken" or passage.state == "broken"
        assert passage.state != "up" or is_connected
    passage.passed(now + GIVE_UP_AFTER_S)
    assert passage.state != "connecting"
