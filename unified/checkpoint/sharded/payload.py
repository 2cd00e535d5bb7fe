"""The payload of one rank of a sharded checkpoint: its pieces as a stream, and the place of each in it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from unified.checkpoint.manifest import Checksum
from unified.checkpoint.payload import Chunk, compressed, slices
from unified.checkpoint.sharded.index import Shard
from unified.config.runtime import Compression
from unified.tensors.host_buffers import ALIGN, BufferPool, stage_state


@dataclass(frozen=True)
class PlannedPiece:
    """A tensor or an object that this rank writes."""

    name: str
    offsets: list[int] | None
    """Indices of its beginning in the whole tensor; None: an object."""
    sizes: list[int]
    data: torch.Tensor | bytes


class ShardPayload:
    """Copies of pieces; see `unified.checkpoint.payload.Payload`.

    Each piece is compressed by itself and has a checksum of its own, so that a load reads only the pieces it needs.

    Args:
        rank: the rank that writes them.
        pool: gives the memory, and takes it back at `release`.
    """

    def __init__(
        self, pieces: list[PlannedPiece], rank: int, pool: BufferPool, compression: Compression | None
    ) -> None:
        self._rank = rank
        self._compression = compression
        self._pieces = [(piece.name, piece.offsets, piece.sizes) for piece in pieces]
        self._copy = stage_state([piece.data for piece in pieces], pool)
        self.nbytes = self._copy.nbytes
        self.shards: dict[str, list[Shard]] = {}
        """Shards by the name of the entry, once `chunks` was read to its end."""

    def chunks(self) -> Iterator[Chunk]:
        self._copy.wait()
        self.shards = {}
        position = 0
        for (name, offsets, sizes), data in zip(self._pieces, self._copy.value, strict=True):
            if padding := -position % ALIGN:
                yield bytes(padding)
                position += padding
            view, is_raw = stored(data)
            checksum = Checksum()
            for chunk in compressed(slices(view), self._compression):
                checksum.update(chunk)
                yield chunk
            self.shards.setdefault(name, []).append(
                Shard(
                    rank=self._rank,
                    start=position,
                    nbytes=checksum.nbytes,
                    checksum=checksum.text,
                    offsets=offsets,
                    sizes=sizes,
                    is_raw=is_raw,
                )
            )
            position += checksum.nbytes

    def release(self) -> None:
        self._copy.release()


def restored(data: Chunk, shard: Shard, dtype: torch.dtype | None, *, weights_only: bool) -> Any:
    """Return the tensor or object that was stored as these bytes; a sparse tensor as a dense one.

    Args:
        data: a buffer that nothing else uses; it becomes the tensor's memory.
        dtype: None: it is an object.
    """
    if dtype is None or not shard.is_raw:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        return value if dtype is None or value.layout == torch.strided else value.to_dense()
    if not len(data):
        return torch.empty(shard.sizes, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shard.sizes)


def stored(data: torch.Tensor | bytes) -> tuple[memoryview, bool]:
    """Return the bytes of a tensor on the CPU, or of an object, and whether they are the tensor's memory."""
    if isinstance(data, bytes):
        return memoryview(data), False
    is_raw = (
        type(data) is torch.Tensor
        and data.layout == torch.strided
        and data.is_contiguous()
        and not (data.is_quantized or data.is_conj() or data.is_neg())
    )
    if is_raw:
        return memoryview(data.reshape(-1).view(torch.uint8).numpy()), True  # type: ignore[arg-type]
    file = io.BytesIO()
    torch.save(data, file)
    return file.getbuffer(), False
