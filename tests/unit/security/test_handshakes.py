"""What a client makes of libzmq's events: when it is sure that its key is refused, and when it goes on waiting."""

import errno

import pytest
import zmq

from unified.security.handshakes import SURE_AFTER, Handshakes
from unified.security.keys import ClusterKey

KEY = ClusterKey(public="p" * 40, secret="s" * 40)
WELL = (int(zmq.EVENT_HANDSHAKE_SUCCEEDED), 0)
HUNG_UP = (int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), errno.EPIPE)
MISMATCH = (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH))
UNREADABLE = (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC))
DENIED = (int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), 400)


def watched(key: ClusterKey | None, *events: tuple[int, int]) -> Handshakes:
    handshakes = Handshakes("tcp://m:1", key)
    for event in events:
        assert handshakes.take(*event) is (event == WELL)
    return handshakes


@pytest.mark.parametrize(
    ("key", "event", "text"),
    [
        (None, MISMATCH, "the master at tcp://m:1 wants a cluster key: set UNIFIED_KEY_FILE"),
        (KEY, MISMATCH, "the master at tcp://m:1 has no cluster key, and this side has SHA256:"),
        (KEY, DENIED, "it has another one. `unified key show`"),
        (KEY, UNREADABLE, "the master at tcp://m:1 refused this side's cluster key SHA256:"),
    ],
)
def test_some_events_leave_no_doubt(key: ClusterKey | None, event: tuple[int, int], text: str) -> None:
    assert text in str(watched(key, event).refusal)
    assert text in str(watched(key, WELL, event).refusal)


def test_a_master_that_hangs_up_is_believed_to_refuse_a_key_the_third_time() -> None:
    assert watched(KEY, *[HUNG_UP] * (SURE_AFTER - 1)).refusal is None
    said = str(watched(KEY, *[HUNG_UP] * SURE_AFTER).refusal)
    assert "refused this side's cluster key" in said
    assert "it has another one, or none" in said, "a master without a key hangs up as well"


def test_a_master_that_hangs_up_may_only_be_ending() -> None:
    """One that let this side in before, or a tunnel whose far end is not there, is waited for."""
    assert watched(KEY, WELL, *[HUNG_UP] * 20).refusal is None
    keyless = watched(None, *[HUNG_UP] * 20)
    assert keyless.refusal is None
    assert keyless.num_broken == 20
    assert watched(None, *[HUNG_UP] * 20, WELL).num_broken == 0


def test_other_failures_say_nothing_of_keys() -> None:
    late = (int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), errno.ETIMEDOUT)
    rubbish = (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.PROTOCOL_ERROR_ZMTP_UNSPECIFIED))
    assert watched(KEY, *[late] * 5, *[rubbish] * 5).refusal is None


def test_a_handshake_that_succeeds_takes_the_refusal_back() -> None:
    assert watched(KEY, DENIED, WELL).refusal is None
