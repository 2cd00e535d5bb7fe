"""Which way to an inbox."""

import pytest

from unified.bus.transport.routes import Policy, Route, choose_route, ipc_address, read_policy
from unified.errors import OptionError, RpcError
from unified.protocol.records import Inbox

IPC, TCP, RELAY = "ipc:///run/u/i1", "tcp://10.0.0.2:4123", "tcp://10.0.0.1:7078"
BOTH = Inbox(inbox_id="i1", routes=[IPC, TCP], host_id="h1")
NONE = Inbox(inbox_id="i1", routes=[], host_id="h1")


@pytest.mark.parametrize(
    ("inbox", "host_id", "policy", "relay", "expected"),
    [
        (BOTH, "h1", "auto", RELAY, Route("ipc", IPC)),
        (BOTH, "h2", "auto", RELAY, Route("tcp", TCP)),
        (BOTH, "h1", "tcp", RELAY, Route("tcp", TCP)),
        (BOTH, "h1", "relay", RELAY, Route("relay", RELAY)),
        (NONE, "h1", "auto", RELAY, Route("relay", RELAY)),
        (Inbox(inbox_id="i1", routes=[IPC], host_id="h1"), "h2", "auto", RELAY, Route("relay", RELAY)),
        (BOTH, "h2", "auto", "", Route("tcp", TCP)),
    ],
)
def test_choice(inbox: Inbox, host_id: str, policy: Policy, relay: str, expected: Route) -> None:
    assert choose_route(inbox, host_id=host_id, policy=policy, relay=relay) == expected


def test_no_way_says_what_was_looked_at() -> None:
    with pytest.raises(RpcError, match=r"no route leads to inbox i1: it offers no address, .* there is no relay"):
        choose_route(NONE, host_id="h1", policy="auto", relay="")


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        ("auto", {}, "auto"),
        ("auto", {"UNIFIED_BUS_ROUTE": "relay"}, "relay"),
        ("tcp", {"UNIFIED_BUS_ROUTE": "relay"}, "tcp"),
    ],
)
def test_policy(given: str, env: dict[str, str], expected: str) -> None:
    assert read_policy(given, env) == expected


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"'rely' is none of auto, tcp, relay\. Did you mean 'relay'\?"):
        read_policy("auto", {"UNIFIED_BUS_ROUTE": "rely"})


def test_ipc_path_that_no_socket_can_have() -> None:
    assert ipc_address("/run/u", "i1") == ("ipc:///run/u/i1", "")
    address, why_not = ipc_address("/" + "é" * 60, "i1")
    assert address == ""
    assert "would have 124 bytes, 107 are allowed" in why_not
