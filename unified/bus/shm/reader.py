"""The reader's side of shared memory: from the descriptors of a message to views of the sender's segments.

A descriptor of one message is a list that names its buffers in order: a number n for n buffers that follow as frames,
or a list ``[owner, segment, tag, cell, first, count, sole]`` for `count` parts of a segment from `first` on, or for one
that `first` describes: ``[start, bytes]`` of the segment's data. An empty owner is the sender of the message.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from unified.bus.codec.tensors import Buffer
from unified.bus.shm.borrowed import Claim, Loan, SharedSegment, lend
from unified.bus.shm.files import DIRECTORY, is_alive, own_mark, segment_name
from unified.errors import ProtocolError

IDLE_S = 30.0
"""A mapping that no message needed for this long is dropped; the next one makes it anew."""
MAX_SEGMENTS = 2048


class PayloadGoneError(ProtocolError):
    """What a message names was there, and is no more: whoever sent it died, or took this process for dead."""


class SharedReader:
    """Segments of others, mapped here. Safe for threads.

    Args:
        directory: where segments are.
    """

    def __init__(self, directory: str = DIRECTORY) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._segments: dict[tuple[str, int], SharedSegment] = {}
        self._in_use: weakref.WeakSet[SharedSegment] = weakref.WeakSet()
        """Those that are only looked at, too."""
        self._mark = own_mark()

    def borrow(self, sender: str, shared: Sequence[Any], frames: Sequence[Buffer]) -> list[Buffer]:
        """All buffers of a message, in order: views of shared memory, read-only, and frames.

        Ask for it as soon as a message comes, also if it is then dropped: a claim ends when the views are collected.

        Args:
            sender: inbox id.
            shared: the message's descriptor.
            frames: what came on the wire.

        Raises:
            PayloadGoneError: what it names is no longer there.
            ProtocolError: the descriptor is none.
        """
        buffers: list[Buffer] = []
        loans: dict[tuple[str, int, int], Loan] = {}
        num_frames = 0
        error: ProtocolError | None = None
        for part in shared:
            if type(part) is int:
                buffers += frames[num_frames : num_frames + part]
                num_frames += part
                continue
            try:
                self._take(sender, part, loans, buffers)
            except ProtocolError as refusal:  # go on: what can be taken has to be, to be given back
                error = refusal
        if error is not None:
            raise error
        if num_frames != len(frames):
            raise ProtocolError(f"a message names {num_frames} frames of its {len(frames)}.")
        return buffers

    def forget(self, owner: str) -> None:
        """A process is believed dead: drop what is mapped of it. Views of it stay good. It may take long."""
        with self._lock:
            gone = [self._segments.pop(key) for key in list(self._segments) if key[0] == owner]
            theirs = [segment for segment in self._in_use if segment.owner == owner]
        gone.clear()  # not under the lock, which every message with shared memory takes: to unmap takes its time
        for segment in theirs:
            segment.look_for_owner(is_alive)

    def trim(self, now: float) -> bool:
        """Drop mappings that were idle for long, or whose owner gave them up; whether any are left. It may take long.

        Args:
            now: of `time.monotonic`.
        """
        with self._lock:
            every = self._segments
            idle = [key for key, each in every.items() if each.is_closed or now - each.used_at >= IDLE_S]
            gone = [every.pop(key) for key in idle]
            is_any_left = bool(every)
        gone.clear()
        return is_any_left

    def close(self) -> None:
        """Drop every mapping. Views stay good."""
        with self._lock:
            gone, self._segments = self._segments, {}
        gone.clear()

    def _take(self, sender: str, part: Any, loans: dict[tuple[str, int, int], Loan], buffers: list[Buffer]) -> None:
        try:
            owner, number, tag, cell, first, count, is_sole = part
            if not isinstance(owner, str):
                raise TypeError("an owner is an inbox id")
            owner = owner or sender
            key = (owner, number, cell)
            loan = loans.get(key)
            if loan is None:
                segment = self._segment(owner, number)
                if not segment.claims.borrow(cell, tag, self._mark):
                    raise PayloadGoneError(
                        f"the shared memory of a message from {sender} is no longer there: its sender has died, or "
                        "took this process for dead"
                    )
                loan = loans[key] = lend(Claim(segment, cell, tag, is_sole=bool(is_sole)))
            if isinstance(first, list):
                buffers.append(loan.range(*first))
                return
            if not 0 <= first <= first + count <= loan.num_parts:
                raise ProtocolError(f"a message names parts {first} to {first + count} of {loan.num_parts}.")
            buffers += [loan.part(index) for index in range(first, first + count)]
        except OSError as error:
            raise PayloadGoneError(
                f"the shared memory of a message from {sender} cannot be opened ({error}): the process that made it "
                "has ended"
            ) from None
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"not a part of shared memory: {part!r} ({error})") from None

    def _segment(self, owner: str, number: int) -> SharedSegment:
        with self._lock:
            segment = self._segments.get((owner, number))
            if segment is None:
                name = segment_name(owner, number)
                if not isinstance(number, int) or os.path.basename(name) != name:
                    raise ProtocolError(f"no name of a segment: {name!r}")
                segment = SharedSegment(os.path.join(self._directory, name), owner, number)
                if len(self._segments) >= MAX_SEGMENTS:
                    del self._segments[min(self._segments, key=lambda key: self._segments[key].used_at)]
                self._segments[owner, number] = segment
                self._in_use.add(segment)
            segment.used_at = time.monotonic()
            return segment
