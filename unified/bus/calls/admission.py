"""What is looked at before a message is believed: version, job, inbox, sender, and whether it came before."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType

from unified.bus.transport.tombstones import Departed
from unified.errors import ProtocolError
from unified.protocol.envelope import OUTSIDE, Bytes, Envelope, decode_envelope

logger = logging.getLogger(__name__)
MAX_OUTSIDERS = 256
"""Callers from outside the job whose calls are told from repetitions."""


class TooOldError(ProtocolError):
    """A call came so far behind others of its sender that it is not known any more whether it came before."""


class SeenCalls:
    """Which calls of one sender have come, by their places among all that it sent. Not all of them are for this inbox,
    and calls of several threads may overtake one another a little. Takes some 20 KiB at most."""

    KEPT = 65_536
    """So far behind the newest one a call is too old."""
    _BITS = 512

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        """One bit for each call that came."""
        self._first_block = 0

    def is_new(self, place: int) -> bool:
        """Whether it has surely not come before; from now on it has."""
        number, bit = place // self._BITS, 1 << (place % self._BITS)
        if number < self._first_block:
            return False
        block = self._blocks.get(number)
        if block is None:
            self._begin(number)
            block = 0
        if block & bit:
            return False
        self._blocks[number] = block | bit
        return True

    def is_too_old(self, place: int) -> bool:
        """Whether nobody knows any more if it came."""
        return place // self._BITS < self._first_block

    def _begin(self, number: int) -> None:
        first = number - self.KEPT // self._BITS
        if first > self._first_block:
            self._first_block = first
            self._blocks = {each: block for each, block in self._blocks.items() if each >= first}


class Intake:
    """Checks what comes to one inbox.

    Args:
        worker: whose inbox it is, for the log.
        departed: whose calls are not taken in.

    Attributes:
        num_rejected: messages that were dropped.
    """

    def __init__(self, *, job_id: str, inbox_id: str, worker: str, departed: Departed) -> None:
        self._job_id = job_id
        self._inbox_id = inbox_id
        self._worker = worker
        self._departed = departed
        self._seen: dict[str, SeenCalls] = {}
        self._outsiders: deque[str] = deque()
        self.on_outsider_gone: Callable[[str], object] = lambda inbox_id: None
        """Called with the inbox id of a caller from outside the job that is not known any more."""
        self._told: set[tuple[object, ...]] = set()
        self.num_rejected = 0

    def read(self, frame: Bytes) -> Envelope:
        """A first frame, if it is for this inbox.

        Raises:
            ProtocolError: it is to be dropped.
        """
        envelope = decode_envelope(frame)
        if envelope.target != self._inbox_id:
            raise ProtocolError(f"for inbox {envelope.target!r}, which is not this life's")
        if envelope.job != self._job_id and envelope.sender:  # a relay serves all jobs, and has no name of its own
            raise ProtocolError(f"from worker {envelope.worker} of job {envelope.job!r}, and this is {self._job_id!r}")
        return envelope

    def check_new(self, envelope: Envelope) -> None:
        """Whether it is to be run.

        Raises:
            TooOldError: that cannot be told.
            ProtocolError: it came before, or its sender's life is over.
        """
        seen = self._seen.get(envelope.sender)
        if seen is None:
            if envelope.sender in self._departed:
                raise ProtocolError(f"call {envelope.call_id} of a life of worker {envelope.worker} that is over")
            if envelope.worker.startswith(OUTSIDE):
                self._meet_outsider(envelope.sender)
            seen = self._seen[envelope.sender] = SeenCalls()
        if not seen.is_new(envelope.count):
            if seen.is_too_old(envelope.count):
                raise TooOldError(
                    f"call {envelope.call_id} of worker {envelope.worker} came behind {SeenCalls.KEPT} later ones"
                )
            raise ProtocolError(f"call {envelope.call_id} of worker {envelope.worker} came a second time")

    def _meet_outsider(self, inbox_id: str) -> None:
        """Nobody tells when it is gone, so the one that came first is forgotten for one too many."""
        self._outsiders.append(inbox_id)
        if len(self._outsiders) > MAX_OUTSIDERS:
            gone = self._outsiders.popleft()
            self.forget(gone)
            self.on_outsider_gone(gone)

    def forget(self, inbox_id: str) -> None:
        """That life is over; `departed` has it."""
        self._seen.pop(inbox_id, None)

    def reject(self, error: ProtocolError) -> None:
        """Count a message that was dropped; the first of each kind is logged."""
        self.num_rejected += 1
        kind = (type(error), *_raised_at(error.__traceback__))
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(
                "worker=%s event=mail-rejected reason=%r (further ones like it are only counted)",
                self._worker,
                str(error),
            )


def _raised_at(trace: TracebackType | None) -> tuple[object, ...]:
    """The line of code, which says what an error is about when its text differs each time."""
    if trace is None:
        return ()
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code, trace.tb_lineno
