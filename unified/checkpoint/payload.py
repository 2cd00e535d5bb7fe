"""What a save writes: a stream that can be read again for another try, and what is measured of it on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from unified.checkpoint.compression import Chunk, compressed
from unified.checkpoint.manifest import Checksum, Compression
from unified.errors import UsageError

CHUNK_BYTES = 4 << 20
"""Small enough to be in the processor's cache still when it is written, after its checksum was computed."""


class Payload(Protocol):
    """Bytes to be saved.

    Attributes:
        nbytes: in memory, held until `release`.
    """

    nbytes: int

    def chunks(self) -> Iterator[Chunk]:
        """From the beginning, at every call."""
        ...

    def release(self) -> None:
        """It is not needed any more. Can be called twice."""
        ...


class BytesPayload:
    """Bytes that a user gave: referred to where they cannot change, and copied where they can.

    Raises:
        UsageError: there are none, or it is something else.
    """

    def __init__(self, data: object) -> None:
        if isinstance(data, bytes):
            self._view = memoryview(data)
        elif isinstance(data, bytearray | memoryview):
            self._view = memoryview(bytes(data))
        else:
            raise UsageError(
                f"A checkpoint's data are bytes, not {type(data).__name__}. For a state dict use save(state, step), "
                "or torch.save it into an io.BytesIO and give its getvalue()."
            )
        self.nbytes = self._view.nbytes
        if not self.nbytes:
            raise UsageError("The checkpoint's data have 0 bytes, so nothing was saved. Was the state written to them?")

    def chunks(self) -> Iterator[Chunk]:
        return slices(self._view)

    def release(self) -> None:
        self._view = memoryview(b"")


class Measured:
    """A payload on its way into the store: compressed, and with its checksum once it was read to its end."""

    def __init__(self, payload: Payload, compression: Compression | None) -> None:
        self._payload = payload
        self._compression = compression
        self.checksum = Checksum()

    def __iter__(self) -> Iterator[Chunk]:
        self.checksum = Checksum()  # a store that reads it again for a retry of its own begins anew
        for chunk in compressed(self._payload.chunks(), self._compression):
            self.checksum.update(chunk)
            yield chunk


def slices(view: memoryview) -> Iterator[memoryview]:
    """A view in chunks."""
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
