"""When a peer on another host is written to directly, when through the relay, and when what was sent is given up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.bus.transport.failover import CONNECT_WITHIN_S, GIVE_UP_AFTER_S, QUIET_S, DirectOrRelay, State


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        # a peer that answers is written to directly; time does no harm to a connection
        ({"has_relay": True}, [("connected", [], "up"), ("passed", [100 * GIVE_UP_AFTER_S], "up")]),
        # attempts that fail decide nothing before the time has come
        ({"has_relay": True}, [
            *[("disconnected", [], "connecting"), ("passed", [0.9 * CONNECT_WITHIN_S], "connecting")] * 5,
            ("passed", [CONNECT_WITHIN_S], "relayed"),
        ]),
        # without a relay a peer is waited for longer and then given up
        ({"has_relay": False}, [
            ("passed", [0.9 * GIVE_UP_AFTER_S], "connecting"), ("passed", [GIVE_UP_AFTER_S], "broken"),
        ]),
        # what was sent on a connection that broke is given up at once
        ({"has_relay": True}, [
            ("connected", [], "up"), ("disconnected", [], "broken"),
            ("connected", [], "broken"), ("passed", [1000.0], "broken"),
        ]),
        # the direct way is taken again once the relay was not used for a while: direct messages might overtake those
        # that the relay has
        ({"has_relay": True}, [
            ("passed", [CONNECT_WITHIN_S], "relayed"), ("connected", [], "relayed"), ("used_relay", [10.0], "relayed"),
            ("passed", [10.0 + 0.9 * QUIET_S], "relayed"), ("passed", [10.0 + QUIET_S], "up"),
        ]),
        # a connection that came and went is not taken
        ({"has_relay": True, "is_relayed": True}, [
            ("connected", [], "relayed"), ("disconnected", [], "relayed"), ("passed", [100.0], "relayed"),
        ]),
    ],
)  # fmt: skip
def test_what_becomes_of_a_peer(options: dict[str, bool], steps: list[tuple[str, list[float], State]]) -> None:
    route = DirectOrRelay(0.0, **options)
    for event, time, expected in steps:
        getattr(route, event)(*time)
        assert route.state == expected


_EVENTS = st.one_of(
    st.sampled_from(["connected", "disconnected"]),
    st.tuples(st.sampled_from(["passed", "used_relay"]), st.floats(0, 9)),
)


@given(has_relay=st.booleans(), events=st.lists(_EVENTS, max_size=30))
def test_any_events_in_any_order(has_relay: bool, events: list[str | tuple[str, float]]) -> None:
    """Nothing waits for ever, nothing goes through a relay that is not there, and what is given up stays so."""
    route, now, is_connected = DirectOrRelay(0.0, has_relay=has_relay), 0.0, False
    for event in events:
        before = route.state
        if isinstance(event, str):
            getattr(route, event)()
            is_connected = event == "connected"
        else:
            name, seconds = event
            now += seconds
            getattr(route, name)(now)
        assert route.state != "relayed" or has_relay
        assert before != "broken" or route.state == "broken"
        assert route.state != "up" or is_connected
    route.passed(now + GIVE_UP_AFTER_S)
    assert route.state != "connecting"
