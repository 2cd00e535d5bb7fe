"""The relay and the cluster key; and what it does with frames that are not for it to judge, or not of its version."""

import logging
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tests.support.bus import Hub
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope
from unified.security.curve import new_key
from unified.security.keys import ClusterKey
from unified.testing import eventually

Socket = zmq.Socket[bytes]
KEY, OTHER = new_key(), new_key()
DEADLINE_MS = 10_000


class KeyedHub(Hub):
    """A relay with a key, and sockets at it."""

    def member(self, identity: str) -> Socket:
        """One that the relay knows already: what it sends to itself comes back."""
        socket = self.socket(identity, KEY)

        def arrives() -> bool:
            socket.send_multipart([envelope(identity), b"probe"])
            return bool(socket.poll(50))

        eventually(arrives, message="the relay does not let it in")
        while socket.poll(50):
            socket.recv_multipart()
        return socket


@pytest.fixture
def hub() -> Iterator[KeyedHub]:
    hub = KeyedHub(key=KEY)
    yield hub
    hub.close()


def envelope(target: str, call_id: int = 1, *, job: str = "job-1") -> bytes:
    return encode_envelope(Envelope(BUS_VERSION, Kind.CALL, call_id, "a", "worker", target, "method", job=job))


def newer(target: str) -> list[bytes]:
    """A frame as a later release may send it: another version, more fields, other kinds."""
    return [msgspec.msgpack.encode([BUS_VERSION + 1, 99, "id", {"to": target}, None, 1, 2, 3]), b"body"]


def take(socket: Socket) -> list[bytes]:
    assert socket.poll(DEADLINE_MS), "nothing came"
    return socket.recv_multipart()


@pytest.mark.parametrize("key", [None, OTHER], ids=["no key", "another key"])
def test_strangers_neither_send_nor_receive(
    hub: KeyedHub, key: ClusterKey | None, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = hub.member("a"), hub.member("b")
    with caplog.at_level(logging.WARNING):
        stranger = hub.socket("c", key)
        stranger.send_multipart([envelope("b"), b"from a stranger"])
        eventually(lambda: "event=key-refused" in caplog.text, message="nothing is said of it")
        a.send_multipart([envelope("c"), b"to a stranger"])
        head, _ = take(a)
        assert msgspec.msgpack.decode(head)[1] == Kind.UNDELIVERABLE
        a.send_multipart([envelope("b"), b"from a member"])
        assert take(b)[1] == b"from a member"
    assert "at='relay' peer=" in caplog.text
    assert not stranger.poll(50)


def test_a_stranger_cannot_take_a_members_name(hub: KeyedHub) -> None:
    b = hub.member("b")
    impostor = hub.socket("b", OTHER)
    a = hub.member("a")
    for number in range(20):
        a.send_multipart([envelope("b", number), str(number).encode()])
    assert [take(b)[1] for _ in range(20)] == [str(number).encode() for number in range(20)]
    assert not impostor.poll(50)


@pytest.mark.parametrize("rubbish", [[], [[b"\xc1", b""]]], ids=["newer", "newer and other"])
def test_each_kind_of_rubbish_is_logged_once_and_dropped(
    hub: KeyedHub, caplog: pytest.LogCaptureFixture, rubbish: list[list[bytes]]
) -> None:
    a, b = hub.member("a"), hub.member("b")
    with caplog.at_level(logging.WARNING, "unified_master.relay"):
        for frames in [*rubbish, newer("b")] * 50:
            a.send_multipart(frames)
        a.send_multipart([envelope("b"), b"after"])
        assert take(b)[1] == b"after"
    assert hub.relay.num_rejected == 50 * (len(rubbish) + 1)
    *others, newest = caplog.records
    assert len(others) == len(rubbish)
    assert f"the peer speaks bus version {BUS_VERSION + 1}, this side speaks {BUS_VERSION}" in newest.getMessage()


def test_other_jobs_mail_and_replays_are_left_to_the_receiver(hub: KeyedHub) -> None:
    """The relay knows no jobs and keeps nothing: each message goes once to the inbox that it names, and to no other."""
    a, b = hub.member("a"), hub.member("b")
    sent = [[envelope("b", 7, job="job-2"), b"other job"], [envelope("b", 8), b"one"], [envelope("b", 8), b"one"]]
    for message in sent:
        a.send_multipart(message)
    assert [take(b) for _ in sent] == sent
    assert not a.poll(50)
    assert hub.relay.num_rejected == 0
