"""What is looked at before a message is believed: version, job, inbox, sender, and whether it came before."""

from __future__ import annotations

import logging

from unified.errors import ProtocolError
from unified.protocol.envelope import Bytes, Envelope, decode_envelope

logger = logging.getLogger(__name__)


class SeenCalls:
    """Which calls of one sender have come. Its ids rise, but not all of them are for this inbox, and calls of several
    threads may overtake one another a little. Takes some 20 KiB at most."""

    KEPT = 65_536
    """An id so far below the highest one is taken for a repetition."""
    _BITS = 512

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        """One bit for each id that came."""
        self._first_block = 0

    def is_new(self, call_id: int) -> bool:
        """Whether it has not come before; from now on it has."""
        number, bit = call_id // self._BITS, 1 << (call_id % self._BITS)
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

    def _begin(self, number: int) -> None:
        first = number - self.KEPT // self._BITS
        if first > self._first_block:
            self._first_block = first
            self._blocks = {each: block for each, block in self._blocks.items() if each >= first}


class Intake:
    """Checks what comes to one inbox.

    Args:
        worker: whose inbox it is, for the log.

    Attributes:
        num_rejected: messages that were dropped.
    """

    def __init__(self, *, job_id: str, inbox_id: str, worker: str) -> None:
        self._job_id = job_id
        self._inbox_id = inbox_id
        self._worker = worker
        self._seen: dict[str, SeenCalls] = {}
        self._told: set[str] = set()
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
        """ProtocolError if this call came before."""
        seen = self._seen.get(envelope.sender)
        if seen is None:
            seen = self._seen[envelope.sender] = SeenCalls()
        if not seen.is_new(envelope.call_id):
            raise ProtocolError(f"call {envelope.call_id} of worker {envelope.worker} came a second time")

    def forget(self, inbox_id: str) -> None:
        """That life is over."""
        self._seen.pop(inbox_id, None)

    def reject(self, error: ProtocolError) -> None:
        """Count a message that was dropped; the first of each kind is logged."""
        self.num_rejected += 1
        kind = f"{type(error).__name__} {str(error).partition(' ')[0]}"
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(
                "worker=%s event=mail-rejected reason=%r (further ones like it are only counted)",
                self._worker,
                str(error),
            )
