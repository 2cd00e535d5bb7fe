"""The ends of workers' output, as their agents sent them, for readers that ask after a node is gone."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from unified.protocol.records import JobWorkerIncarnation

STREAM_BYTES = 32 * 1024
TOTAL_BYTES = 64 * 1024 * 1024
"""Most bytes of all streams. Beyond it, the stream that grew least recently is dropped."""


class TailPart(NamedTuple):
    """Kept part of a stream; bytes before it may be missing."""

    data: bytes
    offset: int
    size: int
    """Bytes ever written, as far as is known."""


class KeptTails:
    """Ends of streams, in memory only: a new term of the master begins without any."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[JobWorkerIncarnation, str], list[tuple[int, bytes]]] = OrderedDict()
        self._nbytes = 0

    def add(self, incarnation: JobWorkerIncarnation, stream: str, offset: int, data: bytes) -> None:
        """Keep bytes of a stream that follow the kept ones, with or without a gap."""
        parts = self._drop(incarnation, stream)
        if parts and offset < _end(parts):  # its agent began anew
            parts = []
        if parts and offset == _end(parts):
            offset, before = parts.pop()
            data = before + data
        parts.append((offset, data))
        excess = sum(len(part) for _, part in parts) - STREAM_BYTES
        while excess > 0:
            first, oldest = parts.pop(0)
            if len(oldest) > excess:
                parts.insert(0, (first + excess, oldest[excess:]))
            excess -= len(oldest)
        self._kept[incarnation, stream] = parts
        self._nbytes += sum(len(part) for _, part in parts)
        while self._nbytes > TOTAL_BYTES:
            self._drop(*next(iter(self._kept)))

    def read(self, incarnation: JobWorkerIncarnation, stream: str, offset: int, max_bytes: int) -> TailPart | None:
        """Return what is kept from an offset on (negative: from the end); None if nothing of the stream is kept."""
        parts = self._kept.get((incarnation, stream))
        if not parts:
            return None
        size = _end(parts)
        offset = max(0, size + offset) if offset < 0 else offset
        for first, data in parts:
            if offset < first + len(data):
                start = max(offset, first)
                return TailPart(data[start - first :][:max_bytes], start, size)
        return TailPart(b"", offset, offset)  # the reader already has more than was sent to here

    def forget(self, job_id: str) -> None:
        for incarnation, stream in [key for key in self._kept if key[0].job_id == job_id]:
            self._drop(incarnation, stream)

    def _drop(self, incarnation: JobWorkerIncarnation, stream: str) -> list[tuple[int, bytes]]:
        parts = self._kept.pop((incarnation, stream), [])
        self._nbytes -= sum(len(part) for _, part in parts)
        return parts


def _end(parts: list[tuple[int, bytes]]) -> int:
    offset, data = parts[-1]
    return offset + len(data)
