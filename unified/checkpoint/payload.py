"""Payloads: the bytes of a save as a stream of chunks that can be read again, and their compression."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

from unified.checkpoint.manifest import Checksum
from unified.config.runtime import Compression
from unified.errors import CheckpointCorruptError, UsageError, nearest

Chunk = bytes | bytearray | memoryview

CHUNK_BYTES = 4 << 20
"""Size of a chunk: small enough to stay in the processor's cache from its checksum to its write."""
GZIP_LEVEL = 1
"""A higher level hardly makes weights smaller, and keeps the writing thread busy for several times as long."""
ZSTD_LEVEL = 3
_GZIP_WINDOW = 31  # 15 bits of window, and a gzip header


class Payload(Protocol):
    """Bytes to be saved.

    Attributes:
        nbytes: size in memory, held until `release`.
    """

    nbytes: int

    def chunks(self) -> Iterator[Chunk]:
        """Yield the bytes from the beginning, at every call."""
        ...

    def release(self) -> None:
        """Let go of the bytes. Can be called twice."""
        ...


class BytesPayload:
    """Bytes of a user: kept by reference if they are immutable, else copied."""

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


class MeasuredStream:
    """A payload on its way into the store, compressed. Its checksum is complete once it was read to its end."""

    def __init__(self, payload: Payload, compression: Compression | None) -> None:
        self._payload = payload
        self._compression = compression
        self.checksum = Checksum()

    def __iter__(self) -> Iterator[Chunk]:
        self.checksum = Checksum()  # the store may read the stream again, for a retry
        for chunk in compressed(self._payload.chunks(), self._compression):
            self.checksum.update(chunk)
            yield chunk


def slices(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class CompressionStreams(NamedTuple):
    """Streams of one compression, with the methods of `zlib`'s, and their error."""

    compressor: Callable[[], Any]
    decompressor: Callable[[], Any]
    error: type[Exception]


def _gzip() -> CompressionStreams:
    return CompressionStreams(
        partial(zlib.compressobj, GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW),
        partial(zlib.decompressobj, _GZIP_WINDOW),
        zlib.error,
    )


def _zstd() -> CompressionStreams:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        try:
            from backports import zstd
        except ImportError as error:
            raise ImportError(
                "compression='zstd' needs the package backports.zstd: pip install 'unified-runtime[zstd]'"
            ) from error
    return CompressionStreams(partial(zstd.ZstdCompressor, level=ZSTD_LEVEL), zstd.ZstdDecompressor, zstd.ZstdError)


COMPRESSIONS: dict[Compression, Callable[[], CompressionStreams]] = {"gzip": _gzip, "zstd": _zstd}
"""Compressions by their name in options and manifests, imported at first use."""


def check_compression(name: str | None) -> Compression | None:
    """Return the compression that a user asked for; ``"none"`` and an empty string mean None."""
    if name in (None, "", "none"):
        return None
    for known in COMPRESSIONS:
        if known == name:
            COMPRESSIONS[known]()
            return known
    names = ", ".join(map(repr, COMPRESSIONS))
    raise UsageError(f"There is no compression {name!r}; there are {names} and None.{nearest(name, [*COMPRESSIONS])}")


def compressed(chunks: Iterable[Chunk], compression: Compression | None) -> Iterator[Chunk]:
    if compression is None:
        yield from chunks
        return
    compressor = COMPRESSIONS[compression]().compressor()
    for chunk in chunks:
        if made := compressor.compress(chunk):
            yield made
    yield compressor.flush()


def decompress(data: Chunk, compression: Compression | None) -> Chunk:
    if compression is None:
        return data
    streams = COMPRESSIONS[compression]()
    reader = streams.decompressor()
    try:
        plain: bytes = reader.decompress(data)
    except streams.error as error:
        raise CheckpointCorruptError(f"what is stored is no {compression} stream: {error}") from error
    if not reader.eof:
        raise CheckpointCorruptError(f"the {compression} stream that is stored ends too early")
    return plain
