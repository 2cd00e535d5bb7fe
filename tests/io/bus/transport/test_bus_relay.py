"""The relay forwards, says what it cannot forward, and waits for nobody."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.bus import DEADLINE_S, Hub, World, entry
from tests.support.ports import unused_port
from unified.bus.transport import listeners
from unified.core.backoff import Backoff
from unified.errors import BusOverloadedError, RouteLostError, RpcError, RpcTimeoutError, UnifiedError
from unified.protocol.envelope import (
    BUS_VERSION,
    Envelope,
    Kind,
    PieceSeries,
    Undelivered,
    decode_envelope,
    decode_undelivered,
    encode_envelope,
)
from unified.protocol.records import Inbox
from unified.testing import eventually
from unified_master.relay import BusRelay

Socket = zmq.Socket[bytes]


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def envelope(target: str, call_id: int = 1, kind: Kind = Kind.CALL, sender: str = "a") -> bytes:
    return encode_envelope(Envelope(BUS_VERSION, kind, call_id, sender, "worker", target, "method"))


def known(hub: Hub, member: Socket, identity: str) -> None:
    """Wait until the relay knows the member: it can send to itself."""
    probe = [envelope(identity, 0, Kind.CANCEL, "nobody"), b"probe"]

    def arrives() -> bool:
        member.send_multipart(probe)
        return bool(member.poll(50))

    eventually(arrives)
    last = [*probe[:1], b"last probe"]
    member.send_multipart(last)
    while member.recv_multipart()[-1] != last[-1]:  # those before it come before it
        pass


def test_forwards_by_the_envelope_alone(hub: Hub) -> None:
    a, b = hub.socket("a"), hub.socket("b")
    known(hub, a, "a")
    known(hub, b, "b")
    message = [envelope("b"), b"\xc1 not for the relay to read", b"x" * 1_000_000, b""]
    a.send_multipart(message)
    assert b.recv_multipart() == message


def test_unknown_target_goes_back_to_the_sender(hub: Hub) -> None:
    a = hub.socket("a")
    known(hub, a, "a")
    a.send_multipart([envelope("nobody", 7), b""])
    head, body = a.recv_multipart()
    back = decode_envelope(head)
    assert (back.kind, back.call_id, back.target) == (Kind.UNDELIVERABLE, 7, "a")
    assert decode_undelivered(body) == Undelivered(kind=Kind.CALL, target="nobody", code="unknown-target")


def test_undeliverable_to_an_unknown_sender_is_the_end_of_it(hub: Hub) -> None:
    a = hub.socket("a")
    known(hub, a, "a")
    before = hub.relay.num_undeliverable
    a.send_multipart([envelope("nobody", 7, sender="neither"), b""])
    eventually(lambda: hub.relay.num_undeliverable == before + 1)
    assert not a.poll(20)


def test_bad_frames_are_counted_and_dropped(hub: Hub) -> None:
    a, b = hub.socket("a"), hub.socket("b")
    known(hub, a, "a")
    known(hub, b, "b")
    for frames in ([b""], [b"\xc1"], [b"x" * 100_000, b""], [envelope("")], [envelope("x" * 300)]):
        a.send_multipart(frames)
    a.send_multipart([envelope("b"), b"after"])
    assert b.recv_multipart()[1] == b"after"
    assert hub.relay.num_rejected == 5


def test_slow_receiver_holds_up_nobody_and_fills_no_memory() -> None:
    with contextlib.closing(Hub(limit_bytes=1 << 20)) as hub:
        a, slow, b = hub.socket("a"), hub.socket("slow", RCVHWM=1, RCVBUF=4096), hub.socket("b")
        for name, member in (("a", a), ("b", b), ("slow", slow)):
            known(hub, member, name)
        for call_id in range(100):
            a.send_multipart([envelope("slow", call_id), b"", b"x" * (1 << 20)])
        a.send_multipart([envelope("b"), b"past it"])
        assert b.recv_multipart()[1] == b"past it"
        head, body = a.recv_multipart()
        assert decode_envelope(head).kind is Kind.UNDELIVERABLE
        assert decode_undelivered(body).code == "overloaded"


def pieces(target: str, number: int, count: int) -> list[list[bytes]]:
    """Return so many pieces of a series, and the message behind them."""
    series = PieceSeries(number, count << 20)
    piece, call = (
        encode_envelope(Envelope(BUS_VERSION, kind, number, "a", "worker", target, "method", series=series))
        for kind in (Kind.PIECE, Kind.CALL)
    )
    return [*([piece, b"", b"x" * (1 << 20)] for _ in range(count)), [call, b""]]


def test_a_series_that_has_begun_is_forwarded_whole_also_to_a_slow_receiver() -> None:
    with contextlib.closing(Hub(limit_bytes=1 << 20)) as hub:
        a, slow = hub.socket("a"), hub.socket("slow", RCVHWM=1, RCVBUF=4096)
        known(hub, a, "a")
        known(hub, slow, "slow")
        sent = pieces("slow", 1, 50)
        for message in sent:
            a.send_multipart(message)
        eventually(lambda: hub.relay.num_forwarded > 0)
        while (message := slow.recv_multipart())[0] != sent[0][0]:  # probes
            pass
        assert [message, *(slow.recv_multipart() for _ in sent[1:])] == sent
        assert not a.poll(20)


def test_a_series_for_which_there_is_no_room_is_given_back_once() -> None:
    with contextlib.closing(Hub(limit_bytes=1 << 20)) as hub:
        a, slow = hub.socket("a"), hub.socket("slow", RCVHWM=1, RCVBUF=4096)
        known(hub, a, "a")
        known(hub, slow, "slow")
        for number in (1, 2):
            for message in pieces("slow", number, 50):
                a.send_multipart(message)
        head, body = a.recv_multipart()
        assert decode_envelope(head).call_id == 2
        assert decode_undelivered(body) == Undelivered(kind=Kind.CALL, target="slow", code="overloaded")
        assert not a.poll(20)
        heads = [decode_envelope(slow.recv_multipart()[0]) for _ in range(51)]
        assert {each.call_id for each in heads if each.series is not None} == {1}


def test_port_that_is_taken_is_an_error_with_the_address(hub: Hub) -> None:
    with pytest.raises(UnifiedError, match=f"cannot listen on {hub.address}: Address already in use"):
        BusRelay(hub.address).start()


def test_host_replaces_a_wildcard() -> None:
    relay = BusRelay("tcp://127.0.0.1:0", host="node-1.example")
    assert relay.start().startswith("tcp://node-1.example:")
    relay.close()
    relay.close()


def test_call_waits_for_a_callee_that_has_not_reached_the_relay_yet(tmp_path: Path, hub: Hub) -> None:
    with contextlib.closing(World(tmp_path, "relay", hub.address)) as world:
        a, _ = world.endpoint("a")
        a.update_directory([entry("b", Inbox(inbox_id="late-inbox"))])
        pending = a.call("b", "ping", (), {}, timeout=DEADLINE_S)
        eventually(lambda: hub.relay.num_undeliverable >= 2)
        head = hub.socket("late-inbox").recv_multipart()[0]
        assert decode_envelope(head).method == "ping"
        assert not pending.done()


def test_calls_that_the_relay_gave_back_keep_their_order(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "unified.bus.calls.pending.GIVEN_BACK", Backoff(first_s=0.5, num_free=0)
    )  # until when the inbox is there
    with contextlib.closing(World(tmp_path, "relay", hub.address)) as world:
        a, _ = world.endpoint("a")
        a.update_directory([entry("b", Inbox(inbox_id="late-inbox"))])
        futures = [a.call("b", "ping", (), {}) for _ in range(20)]
        eventually(lambda: hub.relay.num_undeliverable >= 20)
        late = hub.socket("late-inbox")
        known(hub, late, "late-inbox")
        futures.append(a.call("b", "ping", (), {}))
        came = [decode_envelope(late.recv_multipart()[0]).call_id for _ in futures]
        assert came == sorted(came)


def test_lost_relay_ends_the_calls_that_were_with_it(tmp_path: Path) -> None:
    hub = Hub()
    with contextlib.closing(World(tmp_path, "relay", hub.address)) as world:
        a, _ = world.pair_with_process()
        assert a.call("b", "echo", (1,), {}).result(DEADLINE_S) == 1
        pending = a.call("b", "forever", (), {})
        hub.close()
        with pytest.raises(
            RpcError, match=r"connection to the bus relay broke .* whether its handler ran is not known"
        ):
            pending.result(DEADLINE_S)
        again = BusRelay(hub.address)
        assert again.start() == hub.address
        assert a.call("b", "echo", (2,), {}, timeout=DEADLINE_S).result(DEADLINE_S) == 2
        again.close()


def test_connection_that_breaks_in_its_handshake_ends_no_call(tmp_path: Path) -> None:
    port = unused_port()
    with contextlib.closing(World(tmp_path, "relay", f"tcp://127.0.0.1:{port}")) as world:
        with socket.create_server(("127.0.0.1", port)) as refusing:
            a, _ = world.endpoint("a")
            _, b_inbox = world.endpoint("b", {"ping": lambda: "pong"})
            a.update_directory([entry("b", b_inbox)])
            pending = a.call("b", "ping", (), {}, timeout=DEADLINE_S)
            for _ in range(4):
                refusing.accept()[0].close()
            assert not pending.done()
        relay = BusRelay(f"tcp://127.0.0.1:{port}")
        relay.start()
        assert pending.result(DEADLINE_S) == "pong"
        relay.close()


def test_no_call_overtakes_the_inbox_that_its_answer_goes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = listeners._dealer

    def late(*args: Any) -> Socket:
        dealer = made(*args)
        dealer.set(zmq.RECONNECT_IVL, 2_000)
        return dealer

    address = f"tcp://127.0.0.1:{unused_port()}"
    with contextlib.closing(World(tmp_path, "relay", address)) as world:
        with monkeypatch.context() as patch:
            patch.setattr(listeners, "_dealer", late)
            a, _ = world.endpoint("a")  # its inbox is refused at once, and tried again after 2 s
        _, b_inbox = world.endpoint("b", {"ping": lambda number: number})
        a.update_directory([entry("b", b_inbox)])
        with contextlib.closing(BusRelay(address)) as relay:
            relay.start()
            calls = [a.call("b", "ping", (number,), {}, timeout=DEADLINE_S) for number in range(3)]
            assert [call.result(DEADLINE_S) for call in calls] == [0, 1, 2]


def test_callee_whose_answer_was_lost_with_its_connection_says_so(tmp_path: Path, relay: str) -> None:
    with contextlib.closing(World(tmp_path, "relay", relay)) as world:
        a, b = world.pair({"ping": lambda: "pong", "swallow": lambda: "lost"})
        assert a.call("b", "ping", (), {}).result(DEADLINE_S) == "pong"
        reply, answered = b._server._reply, threading.Event()

        def lose(*args: Any, **kwargs: Any) -> bool:
            answered.set()
            return True

        b._server._reply = lose
        pending = a.call("b", "swallow", (), {})
        assert answered.wait(DEADLINE_S)
        b._server._reply = reply
        assert not pending.done()
        b._dispatcher.relay_lost()
        b._dispatcher.relay_found()
        with pytest.raises(RouteLostError, match="the answer to 'swallow' may have been lost"):
            pending.result(DEADLINE_S)
        assert a.call("b", "ping", (), {}).result(DEADLINE_S) == "pong"


def test_overloaded_relay_is_an_error_of_the_call(tmp_path: Path) -> None:
    with (
        contextlib.closing(Hub(limit_bytes=1 << 20)) as hub,
        contextlib.closing(World(tmp_path, "relay", hub.address)) as world,
    ):
        a, process = world.pair_with_process()
        assert a.call("b", "echo", (1,), {}).result(DEADLINE_S) == 1
        process.kill(signal.SIGSTOP)
        futures = [a.call("b", "echo", (b"x" * (8 << 20),), {}, timeout=DEADLINE_S) for _ in range(8)]
        with pytest.raises(BusOverloadedError, match="the relay dropped the call of 'echo' to worker b"):
            futures[-1].result(DEADLINE_S)
        process.kill(signal.SIGCONT)
        first = futures[0].result(DEADLINE_S)
        assert len(first) == 8 << 20
        for future in futures[1:-1]:
            assert isinstance(future.exception(DEADLINE_S), BusOverloadedError | RpcTimeoutError | None)
