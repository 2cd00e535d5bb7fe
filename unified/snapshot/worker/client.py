"""The worker's end of the connection to its node's snapshot server: one request at a time, and mapped buffers."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from unified.errors import SnapshotError, SnapshotQuotaError
from unified.protocol import snapshots as protocol
from unified.snapshot.memory import MappedBuffer
from unified.snapshot.storage import write_within_s

ANSWER_WITHIN_S = 330.0
"""Longest wait for an answer that the server can give at once."""
WRITES_AHEAD = 16
"""Longest wait for an answer that the server gives after writes or transfers, as a multiple of one write's deadline.

Each write has a deadline in the server, and two run at a time: this limit ends the wait for a server that is stopped.
"""
A = TypeVar("A", bound=protocol.SnapshotAnswer)


class WritableBuffer(NamedTuple):
    number: int
    buffer: MappedBuffer
    confirmed: protocol.SnapshotStamp
    complaint: str
    num_buffers: int
    waited_s: float
    """Wait for the last snapshot, which was still on its way."""


class SnapshotClient:
    """Connection of one worker to the snapshot server of its node, made at the first request. For one thread."""

    def __init__(self, run_dir: str, attach: protocol.AttachSeries) -> None:
        self._path = Path(run_dir) / protocol.LISTENER_NAME
        self._attach = attach
        self._socket: socket.socket | None = None
        self._mapped: dict[int, MappedBuffer] = {}

    def attach(self, attach: protocol.AttachSeries | None = None) -> protocol.Attached:
        """Identify this worker, in each round, and to a new server; return the server's snapshots of the role."""
        self._attach = attach or self._attach
        if self._socket is not None:
            try:
                return self._ask(self._attach, protocol.Attached)
            except SnapshotError:
                if self._socket is not None:  # refused by a running server
                    raise
        return self._connect()

    def begin(
        self, nbytes: int, needed: tuple[protocol.SnapshotStamp, ...] = (), *, is_sent: bool = False
    ) -> WritableBuffer:
        """Return a buffer to write.

        Raises:
            SnapshotQuotaError: the quota has no room.
        """
        began = time.monotonic()
        answer = self._ask(
            protocol.BeginSnapshot(nbytes=nbytes, needed=[*needed], is_sent=is_sent),
            protocol.Writable,
            protocol.BufferWanted,
        )
        waited_s = time.monotonic() - began
        if isinstance(answer, protocol.BufferWanted):
            answer = self._ask(protocol.AddBuffer(nbytes=nbytes), protocol.Writable)
        assert isinstance(answer, protocol.Writable)
        buffer = self._mapped[answer.buffer]
        buffer.find_pages()
        return WritableBuffer(answer.buffer, buffer, answer.confirmed, answer.complaint, len(answer.buffers), waited_s)

    def prepare(self, nbytes: int) -> None:
        """Add a second buffer for a later snapshot. Without room do nothing: the later `begin` will raise."""
        if len(self._mapped) > 1:  # the next snapshot came first
            return
        with contextlib.suppress(SnapshotQuotaError):
            answer = self._ask(protocol.AddBuffer(nbytes=nbytes, is_idle=True), protocol.Writable)
            self._mapped[answer.buffer].find_pages()

    def commit(self, request: protocol.CommitSnapshot) -> protocol.Attached:
        """Say that a buffer is written."""
        return self._ask(request, protocol.Attached)

    def go_back(self, stamp: protocol.SnapshotStamp) -> None:
        """Drop snapshots later than the one to which all ranks go back."""
        self._ask(protocol.AgreeOn(stamp=stamp), protocol.Attached)

    def held_elsewhere(self) -> list[protocol.HeldElsewhere]:
        """Return what the job's copy node, and nodes that its workers have left, hold of the role."""
        return self._ask(protocol.ListElsewhere(), protocol.ListedElsewhere).nodes

    def end(self) -> None:
        """Say that no snapshot is needed any more."""
        if self._socket is not None:
            self._ask(protocol.EndSeries(), protocol.Attached)

    def open(
        self, source: protocol.SnapshotSource, stamp: protocol.SnapshotStamp, own: protocol.ServerAddress
    ) -> memoryview:
        """Return the image of a snapshot, which another node's server may have.

        One of the worker's own buffers stays mapped, for later snapshots.
        """
        is_near = source.server is None or source.server.node == own.node
        request = protocol.OpenSnapshot(
            series=source.series, stamp=stamp, length=source.length, source=None if is_near else source.server
        )
        answer, descriptors = self._exchange(request)
        if not isinstance(answer, protocol.Readable) or not descriptors:
            raise self._error(answer)
        buffer = MappedBuffer(descriptors[0]) if answer.buffer is None else self._keep(answer.buffer, descriptors[0])
        return memoryview(buffer.memory)[: answer.length]

    def close(self) -> None:
        """Hang up: the server keeps what was committed."""
        self._mapped.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> protocol.Attached:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(ANSWER_WITHIN_S)
        try:
            connection.connect(str(self._path))
        except OSError as error:
            connection.close()
            raise SnapshotError(
                f"The snapshot server of this node cannot be reached at {self._path} ({error.strerror}): look for "
                "event=snapshots in the log of its agent."
            ) from error
        self._socket = connection
        try:
            return self._ask(self._attach, protocol.Attached)
        except SnapshotError:
            self.close()
            raise

    def _ask(self, request: protocol.SnapshotRequest, *wanted: type[A]) -> A:
        answer, descriptors = self._exchange(request)
        if not isinstance(answer, wanted):
            for descriptor in descriptors:
                os.close(descriptor)
            raise self._error(answer)
        if isinstance(answer, protocol.Writable):
            self._map(answer, descriptors)
        return answer

    def _map(self, answer: protocol.Writable, descriptors: list[int]) -> None:
        """Map a new buffer, and unmap buffers that the server has dropped."""
        for number in self._mapped.keys() - set(answer.buffers):
            del self._mapped[number]
        for descriptor in descriptors:
            self._keep(answer.buffer, descriptor)

    def _keep(self, number: int, descriptor: int) -> MappedBuffer:
        """Return one of the worker's own buffers, mapped now unless it was; close the descriptor."""
        if number in self._mapped:
            os.close(descriptor)
        else:
            self._mapped[number] = MappedBuffer(descriptor)
        return self._mapped[number]

    def _exchange(self, request: protocol.SnapshotRequest) -> tuple[protocol.SnapshotAnswer, list[int]]:
        if self._socket is None:
            self._connect()
        assert self._socket is not None
        within_s = _within_s(request)
        self._socket.settimeout(within_s)
        try:
            self._socket.send(protocol.encode_snapshot_message(request))
            data, descriptors, _, _ = socket.recv_fds(self._socket, protocol.PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise EOFError
            return protocol.snapshot_answer.decode(data), descriptors
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.close()
            why = f"has not answered for {within_s:.0f} s" if isinstance(error, TimeoutError) else "is gone"
            raise SnapshotError(
                f"The snapshot server of this node {why} ({error or 'end of file'}); the next snapshot starts another "
                "one, and what this one held is lost: look for event=snapshots in the log of the agent."
            ) from error

    def _error(self, answer: protocol.SnapshotAnswer) -> SnapshotError:
        if isinstance(answer, protocol.SnapshotRefused):
            if answer.is_quota:
                return SnapshotQuotaError(
                    f"{answer.reason}. Give the agent more with --snapshot-mb, or take smaller snapshots."
                )
            return SnapshotError(f"The snapshot server of this node refused: {answer.reason}.")
        return SnapshotError(f"The snapshot server of this node answered with {type(answer).__name__}.")


def _within_s(request: protocol.SnapshotRequest) -> float:
    """Return the longest wait for the answer to a request."""
    match request:
        case (
            protocol.BeginSnapshot(is_sent=True, nbytes=nbytes)
            | protocol.BeginSnapshot(needed=[_, _, *_], nbytes=nbytes)
            | protocol.OpenSnapshot(source=protocol.ServerAddress(), length=nbytes)
        ):
            return WRITES_AHEAD * write_within_s(nbytes)
        case _:
            return ANSWER_WITHIN_S
