"""Streams of chunks, compressed and back."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from unified.checkpoint.manifest import Compression
from unified.errors import CheckpointCorruptError, UsageError, nearest

Chunk = bytes | bytearray | memoryview

GZIP_LEVEL = 1
"""Weights hardly get smaller with a higher one, and the writing thread would be busy for several times as long."""
ZSTD_LEVEL = 3
_GZIP_WINDOW = 31  # 15 bits of window, and a gzip header


def check_compression(name: str | None) -> Compression | None:
    """What a user asked for; ``"none"`` and an empty string mean None.

    Raises:
        UsageError: there is no such compression.
        ImportError: it needs a package that is not installed.
    """
    if name in (None, "", "none"):
        return None
    if name not in get_args(Compression):
        known = ", ".join(map(repr, get_args(Compression)))
        raise UsageError(
            f"There is no compression {name!r}; there are {known} and None.{nearest(name, get_args(Compression))}"
        )
    if name == "zstd":
        _zstd()
    return name  # type: ignore[return-value]


def compressed(chunks: Iterable[Chunk], compression: Compression | None) -> Iterator[Chunk]:
    """The stream of `chunks` in as few bytes as that gives."""
    if compression is None:
        yield from chunks
        return
    compressor: Any
    if compression == "gzip":
        compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    else:
        compressor = _zstd().ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    for chunk in chunks:
        if made := compressor.compress(chunk):
            yield made
    yield compressor.flush()


def decompress(data: Chunk, compression: Compression | None) -> Chunk:
    """What was compressed.

    Raises:
        CheckpointCorruptError: it is no such stream, or ends too early.
    """
    if compression is None:
        return data
    if compression == "gzip":
        reader: Any = zlib.decompressobj(_GZIP_WINDOW)
        failure: type[Exception] = zlib.error
    else:
        reader, failure = _zstd().ZstdDecompressor().decompressobj(), _zstd().ZstdError
    try:
        plain: bytes = reader.decompress(data)
    except failure as error:
        raise CheckpointCorruptError(f"what is stored is no {compression} stream: {error}") from error
    if not reader.eof:
        raise CheckpointCorruptError(f"the {compression} stream that is stored ends too early")
    return plain


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            "compression='zstd' needs the package zstandard: pip install 'unified-runtime[zstd]'"
        ) from error
    return zstandard
