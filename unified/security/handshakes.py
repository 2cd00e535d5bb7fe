"""The client's side of handshakes with a master: which keys to try, and whether a connection can come at all."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable

import zmq

from unified.errors import KeyFileError
from unified.security.curve import read_event
from unified.security.keys import KEY_VARIABLE, ClusterKey, current, learn, master_listener, met

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events of a connecting socket, for `Handshakes.take`."""
SURE_AFTER = 3
"""Broken handshakes that prove a wrong key: a server hangs up on an unreadable client, but also when it ends."""
MAX_OTHERS = 2
"""Attempts with other keys within `OTHERS_S`; later failures have another reason."""
OTHERS_S = 2.0
READ_EVERY_S = 30.0
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)


class KeyChoice:
    """Choice of the keys for one master, which may know of a new key earlier or later than this side.

    Args:
        find: reads the key file again; None: there is no file, and `keys.learn` gets new keys.
    """

    def __init__(self, key: ClusterKey | None, find: Callable[[], ClusterKey | None] | None = None) -> None:
        learn(key)
        self._key = key
        self._find = find
        self._attempt = self._num_others = 0
        self._others_at = 0.0
        self._picked = ("", "")
        self._read_at = 0.0

    def pick(self) -> str:
        """Return the public half that the master may listen with, for a new socket."""
        self._picked = self._keys()
        return self._picked[0]

    def succeeded(self) -> None:
        """Note that the master has the picked pair."""
        met(self._picked[0])

    def failed(self) -> bool:
        """Note that a handshake failed; return True if the caller has to try a new socket with other keys at once."""
        now = time.monotonic()
        if now >= self._others_at + OTHERS_S:
            self._others_at, self._num_others = now, 0
        if self._key is None or self._num_others == MAX_OTHERS:
            return False
        self.read_file(min_age_s=0.0)
        self._attempt += 1
        if self._keys() == self._picked:
            return False
        self._num_others += 1
        return True

    def read_file(self, min_age_s: float = READ_EVERY_S) -> None:
        """Look in the file for a successor of the key, if the last look is at least `min_age_s` ago."""
        if self._key is not None and self._find is not None and time.monotonic() >= self._read_at + min_age_s:
            self._read_at = time.monotonic()
            with contextlib.suppress(KeyFileError, OSError):
                learn(self._find())

    def _keys(self) -> tuple[str, str]:
        shown = "" if self._key is None else current(self._key).public
        return master_listener(self._key, self._attempt), shown


class Handshakes:
    """Monitor of the handshakes of one socket with one master.

    Attributes:
        refusal: reason why the two cannot talk, once that is sure; None before, and after a handshake that succeeded.
        num_broken: handshakes that the master ended without a word, since the last that succeeded.
        num_failed: handshakes that failed in any way, since the last that succeeded.
    """

    def __init__(self, address: str, key: ClusterKey | None) -> None:
        self.refusal: str | None = None
        self.num_broken = self.num_failed = 0
        self._address = address
        self._key = key
        self._was_ever_well = False

    def read(self, monitor: zmq.Socket[bytes]) -> bool:
        """Take one event from a socket's monitor; return True if a handshake succeeded."""
        return self.take(*read_event(monitor))

    def take(self, event: int, value: int) -> bool:
        """Take one event of libzmq; return True if a handshake succeeded."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refusal, self.num_broken, self.num_failed, self._was_ever_well = None, 0, 0, True
            return True
        self.num_failed += 1
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
        mine = current(self._key).fingerprint if self._key is not None else ""
        return (
            f"the master at {self._address} refused this side's cluster key {mine}: {theirs}. `unified key show` has "
            f"to say the same on both hosts. ({KEY_VARIABLE} names the file of the key; empty, this side has none.)"
        )

    def _only_one_has_one(self) -> str:
        if self._key is None:
            return f"the master at {self._address} wants a cluster key: set {KEY_VARIABLE} to a copy of its key file."
        return (
            f"the master at {self._address} has no cluster key, and this side has {current(self._key).fingerprint}: "
            f"start the master with it, or set {KEY_VARIABLE} to an empty value here to use no key."
        )
