"""Reader's side of shared memory: from the descriptors of a message to views of the sender's segments.

The descriptor of a message is a list that names its buffers in order. An item is a number n for n buffers that follow
as frames, or a list ``[owner, segment, tag, entry, first, count, sole]`` for `count` parts of a segment from `first`
on. If `first` is ``[start, bytes]``, it is one buffer: a range of the segment's data. An empty owner is the sender.

Each view is borrowed from a mapping of the segment, and holds one reader reference. It is an object of which
memoryviews are made, so that every array over it keeps it alive. When it is collected, on any thread, the reference is
given back: a store into the segment's header.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from unified.bus.buffers import Buffer
from unified.bus.shm import files
from unified.bus.shm.layout import (
    CLOSED_WORD,
    HEADER_BYTES,
    MAGIC,
    MAGIC_WORD,
    NUM_WORDS,
    OWNER_WORD,
    PARTS_WORD,
    ReaderReferences,
)
from unified.bus.shm.segment import Mapping, array_type, extents
from unified.errors import ProtocolError
from unified.tensors.copy import address_of
from unified.threads import own_pid

_forwarding = threading.Lock()
_known: weakref.WeakSet[SharedSegment] = weakref.WeakSet()
"""All segments that are mapped here."""


class SharedSegment:
    """A segment of another process, mapped here. `owner` is the inbox id of the process that made it.

    OSError: it cannot be opened or mapped. ProtocolError: it is no segment.
    """

    def __init__(self, path: str, owner: str, number: int) -> None:
        self.path = path
        self.owner = owner
        self.number = number
        self.used_at = 0.0
        self.is_orphan = False
        """True once its process is known to be gone: the last release here removes the file."""
        descriptor = files.open_segment(path)
        try:
            size = os.fstat(descriptor).st_size
            if size <= HEADER_BYTES:
                raise ProtocolError(f"{path} is no segment of shared memory: it has {size} bytes.")
            self.readable = Mapping(descriptor, size)
            self.writable = Mapping(descriptor, size, writable=True)
        finally:
            os.close(descriptor)
        self._words = self.writable.words(NUM_WORDS)
        self._lengths = self.readable.view()[HEADER_BYTES : size - size % 8].toreadonly().cast("Q")
        if self._words[MAGIC_WORD] != MAGIC:
            raise ProtocolError(f"{path} is no segment of shared memory of this version.")
        self.references = ReaderReferences(self._words)
        self._privates: list[Mapping] = []
        _known.add(self)

    @property
    def is_closed(self) -> bool:
        """True if its owner is done with it."""
        return bool(self._words[CLOSED_WORD])

    @property
    def data_bytes(self) -> int:
        return self.readable.size - HEADER_BYTES

    def read_extents(self) -> list[tuple[int, int]]:
        """Return start and length of each part of the present use; ProtocolError: they do not fit the segment."""
        count = self._words[PARTS_WORD]
        if count * 8 > self.data_bytes:
            raise ProtocolError(f"{self.path} claims {count} parts.")
        sizes = self._lengths[:count].tolist()
        found = extents(sizes)
        if any(start + size > self.data_bytes for start, size in found):
            raise ProtocolError(f"{self.path} claims parts beyond its end.")
        return found

    def take_private(self) -> Mapping | None:
        """Return a private mapping to write to, for one user at a time; None: none can be made any more."""
        with contextlib.suppress(IndexError):
            return self._privates.pop()
        try:
            descriptor = files.open_segment(self.path)
        except OSError:
            return None
        try:
            return Mapping(descriptor, self.readable.size, writable=True, private=True)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def return_private(self, mapping: Mapping) -> None:
        mapping.forget_writes()
        self._privates.append(mapping)

    def look_for_owner(self) -> None:
        """Check an owner that is believed dead: if it is dead, the file is removed with the last reference."""
        if not files.is_alive(self._words[OWNER_WORD]):
            self.is_orphan = True
            self.remove_if_left()

    def remove_if_left(self, *, but_for: int = 0) -> None:
        """Remove the file of a dead or closed owner if no process but that of the mark `but_for` reads it."""
        if self.is_orphan or self.is_closed:
            files.remove_if_unreferenced(self.path, self.references, but_for=but_for)


class HeldReference:
    """Entry of a segment, held by this process."""

    __slots__ = ("_own_pid", "_pid", "entry", "extents", "is_sole", "num_forwarded", "segment", "tag")

    def __init__(self, segment: SharedSegment, entry: int, tag: int, *, is_sole: bool) -> None:
        self.segment = segment
        self.entry = entry
        self.tag = tag
        self.is_sole = is_sole
        """True if nobody else was granted this use of the slot, so that this process may write to it."""
        self.num_forwarded = 0
        self._own_pid = own_pid
        self._pid = own_pid()
        try:
            self.extents = segment.read_extents()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._own_pid() != self._pid:
            return  # a forked child: the reference is its parent's
        self.segment.references.give_back(self.entry)
        self.segment.remove_if_left()

    def can_forward(self, num_readers: int) -> bool:
        return self.segment.references.has_sub_entries(self.entry, self.num_forwarded + num_readers)

    def forward(self, mark: int) -> int | None:
        """Return an entry for one more reader, from this process; None: no entry is left."""
        with _forwarding:
            entry = self.segment.references.forward(self.entry, self.num_forwarded, mark)
            self.num_forwarded += 1
        return entry


class BorrowedBuffer:
    """A segment's data behind the views of one reference. A mixin of ctypes arrays, which `borrowed_buffer` makes."""

    reference: HeldReference

    def __del__(self) -> None:
        reference = self.__dict__.get("reference")
        if reference is not None:
            reference.release()

    def part(self, index: int) -> memoryview:
        """Return one part, read-only; it keeps the borrowed buffer alive."""
        return self._view(*self.reference.extents[index])

    def range(self, start: int, nbytes: int) -> memoryview:
        """Return a range of the data, read-only; it keeps the borrowed buffer alive. ProtocolError: it is not there."""
        if not 0 <= start <= start + nbytes <= self.reference.segment.data_bytes:
            raise ProtocolError(f"a message names bytes {start} to {start + nbytes}, beyond the end of its segment.")
        return self._view(start, nbytes)

    def part_of(self, view: memoryview) -> int | tuple[int, int]:
        """Return the number of the part, or the range of the data, that a view of this buffer shows."""
        place = (self._offset(view), view.nbytes)
        return next((index for index, each in enumerate(self.reference.extents) if each == place), place)

    def _view(self, start: int, nbytes: int) -> memoryview:
        whole: Any = self
        return memoryview(whole).cast("B")[start : start + nbytes].toreadonly()

    def open_window(self, *, is_only: bool) -> Any:
        """Return writable memory with the same data; None: there is none, make a copy.

        The window is the segment itself if nobody else was granted it, and nobody in this process will read the data
        again (`is_only`). Otherwise its pages are copied when they are written to.
        """
        reference = self.reference
        window: Any
        if is_only and reference.is_sole:
            window = array_type(_PlainWindow, reference.segment.data_bytes).from_address(
                reference.segment.writable.address + HEADER_BYTES
            )
            window.borrowed = self
            return window
        mapping = reference.segment.take_private()
        if mapping is None:
            return None
        window = array_type(_PrivateWindow, reference.segment.data_bytes).from_address(mapping.address + HEADER_BYTES)
        window.borrowed, window.mapping, window.pid = self, mapping, own_pid()
        return window

    def through(self, window: Any, view: memoryview) -> memoryview:
        """Return the bytes that `view` of this buffer shows, in a window of it."""
        start = self._offset(view)
        return memoryview(window).cast("B")[start : start + view.nbytes]

    def _offset(self, view: memoryview) -> int:
        return address_of(view) - self.reference.segment.readable.address - HEADER_BYTES


class _PlainWindow:
    borrowed: BorrowedBuffer


class _PrivateWindow:
    borrowed: BorrowedBuffer
    mapping: Mapping
    pid: int
    _own_pid = staticmethod(own_pid)

    def __del__(self) -> None:
        found = self.__dict__
        if "pid" in found and self._own_pid() == self.pid:
            self.borrowed.reference.segment.return_private(self.mapping)


def borrowed_buffer(reference: HeldReference) -> BorrowedBuffer:
    """Borrow the data of a reference, until no view of it is left."""
    segment = reference.segment
    array: Any = array_type(BorrowedBuffer, segment.data_bytes).from_address(segment.readable.address + HEADER_BYTES)
    array.reference = reference
    borrowed: BorrowedBuffer = array
    return borrowed


def borrowed_behind(buffer: object) -> BorrowedBuffer | None:
    """Find the borrowed buffer behind a view or an array."""
    for _ in range(8):  # views of views; numpy keeps such chains short
        if isinstance(buffer, BorrowedBuffer):
            return buffer
        buffer = buffer.obj if isinstance(buffer, memoryview) else getattr(buffer, "base", None)
        if buffer is None:
            return None
    return None


@atexit.register
def _leave_all() -> None:
    """Remove unused files at the interpreter's end, which collects nothing. (A worker's agent would sweep, too.)"""
    mark = files.own_mark()
    for segment in list(_known):
        segment.remove_if_left(but_for=mark)


IDLE_S = 30.0
"""Time after which a mapping that no message needed is dropped; the next message maps the segment again."""
MAX_SEGMENTS = 2048


class PayloadGoneError(ProtocolError):
    """The shared memory that a message names is gone: its sender died, or took this process for dead."""


class SharedReader:
    """Segments of others, mapped here. Safe for threads."""

    def __init__(self, directory: str = files.DIRECTORY) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._segments: dict[tuple[str, int], SharedSegment] = {}
        self._in_use: weakref.WeakSet[SharedSegment] = weakref.WeakSet()
        """All mapped segments, also dropped ones that a view keeps."""
        self._mark = files.own_mark()

    def borrow(self, sender: str, shared: Sequence[Any], frames: Sequence[Buffer]) -> list[Buffer]:
        """Return all buffers of a message, in order: views of shared memory, read-only, and frames.

        Call it as soon as a message comes, even if that is dropped then: collecting the views ends the references.

        Raises:
            PayloadGoneError: memory that the descriptor (`shared`) names is gone.
            ProtocolError: `shared` is no descriptor.
        """
        buffers: list[Buffer] = []
        all_borrowed: dict[tuple[str, int, int], BorrowedBuffer] = {}
        num_frames = 0
        error: ProtocolError | None = None
        for part in shared:
            if type(part) is int:
                buffers += frames[num_frames : num_frames + part]
                num_frames += part
                continue
            try:
                self._take(sender, part, all_borrowed, buffers)
            except ProtocolError as refusal:  # go on: take the other references, so that they are given back
                error = refusal
        if error is not None:
            raise error
        if num_frames != len(frames):
            raise ProtocolError(f"a message names {num_frames} frames of its {len(frames)}.")
        return buffers

    def forget(self, owner: str) -> None:
        """Drop the mappings of a process believed dead. Views stay valid. It may take long."""
        with self._lock:
            gone = [self._segments.pop(key) for key in list(self._segments) if key[0] == owner]
            theirs = [segment for segment in self._in_use if segment.owner == owner]
        gone.clear()  # not under the lock, which every message with shared memory takes: unmapping is slow
        for segment in theirs:
            segment.look_for_owner()

    def trim(self, now: float) -> bool:
        """Drop mappings that were idle for long, or whose owner closed them; return whether any are left."""
        with self._lock:
            every = self._segments
            idle = [key for key, each in every.items() if each.is_closed or now - each.used_at >= IDLE_S]
            gone = [every.pop(key) for key in idle]
            is_any_left = bool(every)
        gone.clear()
        return is_any_left

    def close(self) -> None:
        """Drop every mapping. Views stay valid."""
        with self._lock:
            gone, self._segments = self._segments, {}
        gone.clear()

    def _take(
        self, sender: str, part: Any, all_borrowed: dict[tuple[str, int, int], BorrowedBuffer], buffers: list[Buffer]
    ) -> None:
        try:
            owner, number, tag, entry, first, count, sole = part
            if not isinstance(owner, str):
                raise TypeError("an owner is an inbox id")
            owner = owner or sender
            key = (owner, number, entry)
            borrowed = all_borrowed.get(key)
            if borrowed is None:
                segment = self._segment(owner, number)
                if not segment.references.borrow(entry, tag, self._mark):
                    raise PayloadGoneError(
                        f"the shared memory of a message from {sender} is no longer there: its sender has died, or "
                        "took this process for dead"
                    )
                borrowed = all_borrowed[key] = borrowed_buffer(HeldReference(segment, entry, tag, is_sole=bool(sole)))
            if isinstance(first, list):
                buffers.append(borrowed.range(*first))
                return
            num_parts = len(borrowed.reference.extents)
            if not 0 <= first <= first + count <= num_parts:
                raise ProtocolError(f"a message names parts {first} to {first + count} of {num_parts}.")
            buffers += [borrowed.part(index) for index in range(first, first + count)]
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
                name = files.segment_name(owner, number)
                if not isinstance(number, int) or os.path.basename(name) != name:
                    raise ProtocolError(f"no name of a segment: {name!r}")
                segment = SharedSegment(os.path.join(self._directory, name), owner, number)
                if len(self._segments) >= MAX_SEGMENTS:
                    del self._segments[min(self._segments, key=lambda key: self._segments[key].used_at)]
                self._segments[owner, number] = segment
                self._in_use.add(segment)
            segment.used_at = time.monotonic()
            return segment
