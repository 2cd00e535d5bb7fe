"""A state dict as the stream of bytes that ``torch.save`` writes, passed on in pieces and never held as a whole."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import torch

from unified.checkpoint.payload import CHUNK_BYTES, Chunk, slices
from unified.errors import CheckpointError, UsageError
from unified.tensors import walk
from unified.tensors.host_buffers import HostCopy
from unified.threads import start_thread

SMALL_BYTES = 256 << 10
"""Pieces up to this size are copied together: a hand-over for each small tensor would be slow."""


class StatePayload:
    """A copied state dict, to be saved; see `unified.checkpoint.payload.Payload`."""

    def __init__(self, copy: HostCopy) -> None:
        self.nbytes = copy.nbytes
        self._copy = copy

    def chunks(self) -> Iterator[Chunk]:
        self._copy.wait()
        return stream(self._copy.value)

    def release(self) -> None:
        self._copy.release()


def stream(tree: Any) -> Iterator[Chunk]:
    """Yield the bytes of ``torch.save(tree, file)`` in pieces; a piece is valid until the next one is asked for."""
    pipe = ChunkPipe()
    writer = start_thread("checkpoint-pickler", _write, tree, pipe)
    try:
        yield from pipe
    finally:
        pipe.abandon()
        writer.join()


def load_state(data: Chunk, *, map_location: Any, weights_only: bool) -> Any:
    """Load the bytes of `stream` as ``torch.load`` does."""
    try:
        return torch.load(io.BytesIO(data), map_location=map_location, weights_only=weights_only)
    except Exception as error:
        hint = " If you trust who saved it, load it with weights_only=False." if weights_only else ""
        raise CheckpointError(f"The checkpoint is whole, but torch cannot load it: {error}{hint}") from error


def is_sharded(state: Any) -> bool:
    """Return whether a state has sharded tensors, also in modules."""
    return any(walk.is_sharded(each) for each in walk.tensors_in(state, in_modules=True))


class _AbandonedError(Exception):
    """The reader has gone."""


class ChunkPipe:
    """A pipe between two threads: one writes it as a file, the other iterates over it, one chunk at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._piece: memoryview | None = None
        self._is_over = False
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._small = bytearray()

    def write(self, data: Chunk) -> int:
        """Hand a piece over; return once the reader has used the piece, or once it is copied."""
        view = memoryview(data).cast("B")
        if view.nbytes <= SMALL_BYTES:
            self._small += view
            if len(self._small) >= CHUNK_BYTES:
                self._give_small()
        else:
            self._give_small()
            self._give(view)
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: ``torch.save`` calls this method of its file."""

    def finish(self, error: BaseException | None = None) -> None:
        """Note that nothing more is written."""
        with contextlib.suppress(_AbandonedError):
            if error is None:
                self._give_small()
        with self._changed:
            self._is_over, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self._is_abandoned = True
            self._piece = None
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._piece is not None or self._is_over)
                piece = self._piece
                if piece is None:
                    if self._error is not None:
                        raise self._error
                    return
            yield from slices(piece)
            with self._changed:
                self._piece = None
                self._changed.notify_all()

    def _give_small(self) -> None:
        if self._small:
            data, self._small = self._small, bytearray()
            self._give(memoryview(data))

    def _give(self, view: memoryview) -> None:
        with self._changed:
            if self._is_abandoned:
                raise _AbandonedError
            self._piece = view
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._piece is None)
            if self._is_abandoned:
                raise _AbandonedError


def _write(tree: Any, pipe: ChunkPipe) -> None:
    failure: BaseException | None = None
    try:
        with _no_checksums_by_torch(), contextlib.suppress(_AbandonedError):
            torch.save(tree, pipe)  # type: ignore[arg-type]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        failure = UsageError(f"the state cannot be pickled: {error}. Remove these values from the state.")
        failure.__cause__ = error
    except BaseException as error:
        failure = error
    pipe.finish(failure)


def _no_checksums_by_torch() -> contextlib.AbstractContextManager[object]:
    """Turn off torch's CRCs in this thread: they take more than twice the time of our checksum of the same bytes.

    Torch never checks them. A zip tool that unpacks a saved checkpoint complains about each entry.
    """
    try:
        from torch.utils.serialization import config
    except ImportError:  # torch 2.6
        return contextlib.nullcontext()
    return config.patch("save.compute_crc32", False)  # type: ignore[attr-defined, no-any-return]
