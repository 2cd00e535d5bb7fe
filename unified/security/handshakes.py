"""The end of a client's handshakes: it tells of a wrong key, so that nobody waits for a connection that cannot come."""

from __future__ import annotations

import errno

import zmq

from unified.security.curve import read_event
from unified.security.keys import KEY_VARIABLE, ClusterKey

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events of a connecting socket, for `Handshakes.take`."""
SURE_AFTER = 3
"""Broken handshakes that make sure: a server hangs up on a client that it cannot read, but also when it ends."""
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)


class Handshakes:
    """Monitor of the handshakes of one socket with one master.

    Attributes:
        refusal: reason why the two cannot talk, once that is sure; None before, and after a handshake that succeeded.
        num_broken: handshakes that the master ended without a word, since the last that succeeded.
    """

    def __init__(self, address: str, key: ClusterKey | None) -> None:
        self.refusal: str | None = None
        self.num_broken = 0
        self._address = address
        self._key = key
        self._was_ever_well = False

    def read(self, monitor: zmq.Socket[bytes]) -> bool:
        """Take one event from a socket's monitor; return True if a handshake succeeded."""
        return self.take(*read_event(monitor))

    def take(self, event: int, value: int) -> bool:
        """Take one event of libzmq; return True if a handshake succeeded."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refusal, self.num_broken, self._was_ever_well = None, 0, True
            return True
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = self._not_the_same("it has another one")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                self.refusal = self._only_one_has_one()
            elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                self.refusal = self._not_the_same("it has another one")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in _HUNG_UP:
            self.num_broken += 1
            if self._key is not None and self.num_broken >= SURE_AFTER and not self._was_ever_well:
                self.refusal = self._not_the_same("it has another one, or none")
        return False

    def _not_the_same(self, theirs: str) -> str:
        mine = self._key.fingerprint if self._key is not None else ""
        return (
            f"the master at {self._address} refused this side's cluster key {mine}: {theirs}. `unified key show` has "
            f"to say the same on both hosts. ({KEY_VARIABLE} names the file of the key; empty, this side has none.)"
        )

    def _only_one_has_one(self) -> str:
        if self._key is None:
            return f"the master at {self._address} wants a cluster key: set {KEY_VARIABLE} to a copy of its key file."
        return (
            f"the master at {self._address} has no cluster key, and this side has {self._key.fingerprint}: start the "
            f"master with it, or set {KEY_VARIABLE} to nothing here to do without."
        )
