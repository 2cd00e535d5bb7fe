"""Connection to another process of this host: a Unix socket that carries messages both ways.

The caller's process connects; answers come back on the same connection. Sending never blocks: bytes that the kernel
does not take at once wait in a backlog, and an I/O thread sends them when there is room. A thread that waits for an
answer receives it itself (`receive_until`): a second thread that wakes it would take most of the time of a call.

The thread spins for a moment before it sleeps: sleeping and waking takes as long as many answers. If spinning does not
pay (the other side takes long, or has no core of its own), it soon stops, and is tried again from time to time.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from unified.bus.buffers import Buffer
from unified.bus.transport.framing import FrameReader, Frames, RemoteMessage
from unified.errors import ProtocolError
from unified.protocol.records import Inbox
from unified.threads import OwnedLock

SPIN_S = 0.0002
"""Several times the cost of sleeping and waking: enough for the answer to a call with a payload of a megabyte. With 40
µs such calls took a third longer, and single items through a queue twice as long."""
_MAX_FAILED = 3  # failures in a row
_MOST_LEFT_OUT = 64


class Spin:
    """Adaptive spin limit, shared by threads that wait for the same kind of event.

    Args:
        num_cores: cores that this process may use (0: ask the system); with one, spinning would stop the other side.
    """

    def __init__(self, num_cores: int = 0) -> None:
        self._is_possible = (num_cores or len(os.sched_getaffinity(0))) > 1
        self._num_failed = 0
        self._num_to_leave_out = 0

    def is_worth_it(self) -> bool:
        """Return whether to spin this time; if so, call `note` with the outcome."""
        if self._num_to_leave_out:
            self._num_to_leave_out -= 1
            return False
        return self._is_possible

    def note(self, is_found: bool) -> None:
        """Note whether spinning found an event."""
        self._num_failed = 0 if is_found else min(self._num_failed + 1, 16)
        if self._num_failed > _MAX_FAILED:
            self._num_to_leave_out = min(2 ** (self._num_failed - _MAX_FAILED), _MOST_LEFT_OUT)

    def look(self, look: Callable[[int], list[Any]]) -> list[Any]:
        """Return what `look(0)` finds within `SPIN_S`; nothing, without a look, if spinning is not worth it."""
        if not self.is_worth_it():
            return []
        found = look(0)
        if not found:
            until = time.perf_counter() + SPIN_S
            while not found and time.perf_counter() < until:
                found = look(0)
        self.note(bool(found))
        return found


RECEIVE_BYTES = 64 * 1024
FEW_BYTES = 8 * 1024
"""Size of a read unless the last one was full: with 64 KiB, small messages that are kept left holes of 2 MiB a
minute."""
HELD_BYTES = 16 * 1024
"""Bytes of small messages that may wait for one another, to share a write."""
MAX_PIECES = 512
"""Most pieces of one write; the kernel takes 1024."""
_LONGEST_POLL_S = 3600.0


class TransportEvents(Protocol):
    """Receiver of the transport's events (`unified.bus.calls.dispatcher`)."""

    def message_came(self, connection: UnixConnection, frames: Frames) -> None:
        """Take a message from a connection that its peer made; one at a time, on the I/O thread that leads."""

    def answer_came(self, connection: UnixConnection, frames: Frames) -> None:
        """Take a message from a connection of ours, on the thread that reads it."""

    def remote_came(self, message: RemoteMessage) -> None:
        """Take a message from another host or the relay, on the thread for these."""

    def idle(self) -> None:
        """All that had come was handed on, and the I/O thread is about to wait."""

    def became_writable(self, connection: UnixConnection) -> None:
        """The connection is not full any more."""

    def connection_lost(self, connection: UnixConnection, reason: str) -> None:
        """The connection broke."""

    def relayed(self, inbox_id: str) -> None:
        """Calls that waited for a connection to this inbox go through the relay."""

    def lost(self, inbox_id: str, reason: str) -> None:
        """Calls that were sent to this inbox on another host may be lost."""

    def unsure(self, inbox_id: str) -> None:
        """Answers that were sent to this inbox on another host may be lost, and its process is alive."""

    def relay_found(self) -> None:
        """The relay knows the inbox of this process."""

    def relay_lost(self) -> None:
        """The connection to the relay broke, and what was on its way may be lost."""


class Watcher(Protocol):
    """Reader of connections that no waiting thread reads, and writer of their backlogs (`IoThreads`)."""

    def watch(self, connection: UnixConnection) -> None:
        """The connection's `events` changed."""

    def left(self, connection: UnixConnection) -> None:
        """A waiting thread stopped reading it."""

    def remove(self, connection: UnixConnection) -> None:
        """The connection is about to be closed."""

    def deliver(self, connection: UnixConnection, frames: Frames) -> None:
        """Hand on a message that the peer's own connection brought."""


class UnixConnection:
    """One connection.

    Args:
        connected: the socket, which the connection owns from now on.
        peer_id: inbox id of the other side, if this side connected; else empty, until the other side says HELLO.
        full_bytes: backlog above which a peer's connection `is_full`, until at most half of this is left.

    Attributes:
        is_ours: this side connected.
        is_full: the other side does not take its answers. No further calls are read from it, and received calls should
            not begin. So the bytes that wait for a stopped process are bounded.
        watched: the events that the watcher waits for; kept by it.
        can_share: the other side sees this process's shared memory.
        devices: UUIDs of the CUDA devices that the other side sees.
        num_reads: how often a thread has finished reading.
    """

    is_relay = may_give_back = False

    def __init__(
        self,
        connected: socket.socket,
        watcher: Watcher,
        events: TransportEvents,
        *,
        peer_id: str = "",
        full_bytes: int = 0,
    ) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._watcher = watcher
        self._events = events
        self._on_frames = events.answer_came if peer_id else watcher.deliver
        self._full_bytes = full_bytes
        self.is_ours = is_ours = bool(peer_id)
        self.can_share = False
        self.devices: list[str] = []
        self.peer_id = peer_id
        self.fd = connected.fileno()
        self.wants_in = True
        self.watched = 0
        self.is_full = False
        self.is_lost = False
        self.num_reads = 0
        self.error: ProtocolError | None = None
        """Reason why received bytes could not be read."""
        self.reader = 0
        """Ident of the thread that reads, or 0. No lock is held meanwhile: an interrupt may come before its release."""
        self._shall_close = False
        self._counting = threading.Lock()
        self._num_wanting = 0
        """Number of streams, threads and callbacks that expect a message, and do not read."""
        self._frames = FrameReader()
        self._read_size = FEW_BYTES
        self._received: deque[Frames] = deque()  # not handed on yet
        self.lock = self._sending = OwnedLock()
        self._held: list[Buffer] = []
        self._held_bytes = 0
        self._holding: set[UnixConnection] = set()
        self.sent_at = 0.0
        """Time of the last call on it; kept by the sender."""
        self._backlog: deque[memoryview] = deque()
        self.backlog_bytes = 0
        self._writable = threading.Condition(self._sending)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if is_ours else -1
        self._waking = threading.RLock()
        """Guards against a write to a descriptor that was reused."""
        self._spin = Spin()
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        if is_ours:
            self._poll.register(self._wake, select.POLLIN)

    @property
    def events(self) -> int:
        wants_in = self.wants_in and not self.is_full
        return (select.EPOLLIN if wants_in else 0) | (select.EPOLLOUT if self._backlog else 0)

    def meet(self, theirs: Inbox, ours: Inbox) -> None:
        """Note which shared memory and CUDA devices the other side sees."""
        self.can_share = bool(theirs.shm) and theirs.shm == ours.shm
        self.devices = theirs.gpus

    def hold(self, piece: Buffer, holding: set[UnixConnection]) -> bool:
        """Keep a small message back until `release`, or the next `send`; meanwhile the connection is in `holding`.
        Return True if the message is the first: then schedule a tick. `HELD_BYTES` of messages are sent at once."""
        with self._sending:
            is_first = not self._held
            self._holding = holding
            holding.add(self)
            self._held.append(piece)
            self._held_bytes += len(piece)
            if self._held_bytes < HELD_BYTES:
                return is_first
        self.release()
        return False

    def release(self) -> None:
        if self._held:
            self.send(())

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send now, or as soon as the kernel takes the bytes; never block. A lost connection drops them."""
        with self._sending:
            try:
                if self._held:
                    pieces = [b"".join(self._held), *pieces]
                    self._held.clear()
                    self._held_bytes = 0
                    self._holding.discard(self)
                if self.is_lost or not pieces:
                    return
                sent = 0
                if not self._backlog:
                    sent = self._write(pieces)
                    if len(pieces) == 1 and sent == len(pieces[0]):
                        return
                self._keep(pieces, sent)
                if self._backlog:  # each time: the I/O thread may have looked before this was kept
                    self._watcher.watch(self)
            except BaseException as error:
                self._break()
                if isinstance(error, OSError):  # the other side is gone; reading will find that out and say so
                    return
                raise  # such as KeyboardInterrupt: perhaps only a part was sent

    def wait_for_room(self, limit_bytes: int, give_up: Callable[[], bool]) -> bool:
        """Wait until less than `limit_bytes` are in the backlog; return False if `give_up` returned True before."""
        with self._writable:
            while self.backlog_bytes >= limit_bytes and not self.is_lost:
                if give_up():
                    return False
                self._writable.wait(0.05)
        return True

    def flush(self) -> None:
        """Send the backlog, as far as the kernel takes it."""
        with self._sending:
            while self._backlog and not self.is_lost:
                pieces = [self._backlog[i] for i in range(min(len(self._backlog), MAX_PIECES))]
                try:
                    sent = self._write(pieces)
                except OSError:
                    self._break()
                    break
                if not sent:
                    break
                self.backlog_bytes -= sent
                while sent > 0:
                    first = self._backlog.popleft()
                    sent -= first.nbytes
                    if sent < 0:  # so many bytes of it are left
                        self._backlog.appendleft(first[sent:])
            has_room = self.is_full and 2 * self.backlog_bytes <= self._full_bytes
            if has_room:
                self.is_full = False
            self._writable.notify_all()
        if has_room:
            self._events.became_writable(self)

    def read(self, most: int = 16) -> bool:
        """Receive messages (in at most `most` reads) and hand them on; return False if another thread reads."""
        me = threading.get_ident()
        if self.reader == me or not self._begin_reading(me):
            return False
        try:
            for _ in range(most):
                if not self._receive():
                    break
        finally:
            self.num_reads += 1
            self.reader = 0
            if self._shall_close:
                self._close_files()
        return True

    def receive_until(self, done: Callable[[], bool], deadline: float | None) -> None:
        """Receive, on this thread, until `done()` or `deadline` (monotonic); returns at once if another thread does."""
        me = threading.get_ident()
        if self.reader == me:
            return
        try:
            if not self._begin_reading(me):
                self.want()  # before the second try: the present reader checks this when it leaves
                try:
                    if not self._begin_reading(me):
                        return
                finally:
                    self.unwant()
            self.detach()
            while not self.is_lost and not done():
                left_s = _LONGEST_POLL_S if deadline is None else min(deadline - time.monotonic(), _LONGEST_POLL_S)
                if left_s <= 0:
                    return
                for fd, _ in self._spin.look(self._poll.poll) or self._poll.poll(left_s * 1000 + 1):
                    if fd == self.fd:
                        self._receive()
                    else:
                        os.eventfd_read(self._wake)
        finally:
            if self.reader == me:
                self.num_reads += 1
                self.reader = 0
                if self._shall_close:
                    self._close_files()
                if self._num_wanting:
                    self.attach()
                else:
                    self._watcher.left(self)

    def _begin_reading(self, me: int) -> bool:
        """Become the reader, unless another thread is; return whether this thread reads."""
        with self._counting:
            self.reader = self.reader or me
            return self.reader == me

    def want(self) -> None:
        """Have the connection read even if nobody waits in `receive_until`; `unwant` undoes this."""
        with self._counting:
            self._num_wanting += 1
        if not self.reader:
            self.attach()

    def unwant(self) -> None:
        with self._counting:
            self._num_wanting -= 1

    def attach(self) -> None:
        """Have the I/O threads read the connection."""
        if not self.wants_in:
            self.wants_in = True
            self._watcher.watch(self)

    def detach(self) -> None:
        """Have the I/O threads leave the connection alone."""
        if self.wants_in:
            self.wants_in = False
            self._watcher.watch(self)

    def wake(self) -> None:
        """Have the thread in `receive_until` look again."""
        if self.reader and self.reader != threading.get_ident():
            with self._waking:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the connection, without waiting for its present reader; drop the backlog."""
        with self._sending:
            if self._shall_close:
                return
            self._shall_close = True
            self._forget_backlog()
        self._watcher.remove(self)
        self.wake()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._close_files()

    def abandon(self) -> None:
        """Close a forked child's copy of the files, so that the other side sees its parent's end."""
        self.is_lost = self._shall_close = True
        self._release_files()

    def _close_files(self) -> None:
        """Close the files, or leave that to the thread that reads: it must not poll a reused descriptor."""
        with self._counting, self._waking:
            if not self.reader:
                self._release_files()

    def _release_files(self) -> None:
        self.fd = -1
        self._socket.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _write(self, pieces: Sequence[Buffer]) -> int:
        """Write to the socket; return how many bytes the kernel took."""
        try:
            return self._socket.send(pieces[0]) if len(pieces) == 1 else self._socket.sendmsg(pieces[:MAX_PIECES])
        except BlockingIOError:
            return 0

    def _break(self) -> None:
        """Send no more, under `_sending`: a message may have left in part; the reader finds the end."""
        self._backlog.clear()
        self.backlog_bytes = 0
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _forget_backlog(self) -> None:
        """Drop what waits, under `_sending`: the connection is lost."""
        self.is_lost = True
        self.is_full = False
        self._backlog.clear()
        self.backlog_bytes = 0
        self._writable.notify_all()

    def _keep(self, pieces: Sequence[Buffer], sent: int = 0) -> None:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            if sent < view.nbytes:
                self._backlog.append(view[sent:])
                self.backlog_bytes += view.nbytes - sent
            sent = max(sent - view.nbytes, 0)
        if self.backlog_bytes > self._full_bytes and not self.is_ours:
            self.is_full = True

    def _receive(self) -> bool:
        """Read once; return whether there may be more."""
        wanted = self._frames.wanted
        try:
            if wanted is None:
                data = self._socket.recv(self._read_size)
                count = len(data)
                is_full = count == self._read_size
                self._read_size = RECEIVE_BYTES if is_full else FEW_BYTES
                frames = self._frames.feed(data) if count else []
            else:
                with wanted:
                    count = self._socket.recv_into(wanted)
                is_full = True
                frames = self._frames.filled(count) if count else []
            self._received += frames
        except (BlockingIOError, InterruptedError):
            return False
        except (OSError, ValueError) as error:
            self._lose(str(error))
            return False
        except BaseException as error:  # such as KeyboardInterrupt: some of what was received may be lost
            self._lose(f"receiving was stopped by {type(error).__name__}")
            raise
        if not count:
            self._lose("the other side closed it")
            return False
        try:
            self._hand_on()
        except BaseException as error:
            if self._received or not isinstance(error, SystemExit):  # after an interrupt, a message may be lost
                self._lose(f"handing on was stopped by {type(error).__name__}")
            raise
        if self._frames.error is not None:
            self.error = self._frames.error
            self._lose(str(self.error))
            return False
        return is_full

    def _hand_on(self) -> None:
        """Hand on all received messages, even if the thread is interrupted, or a done callback raises SystemExit."""
        stopped_by: BaseException | None = None
        while self._received:
            try:
                while self._received:
                    self._on_frames(self, self._received.popleft())
            except BaseException as error:
                stopped_by = error
        if stopped_by is not None:
            raise stopped_by

    def _lose(self, reason: str) -> None:
        if not self.is_lost:
            with self._sending:
                self._forget_backlog()
            self._events.connection_lost(self, reason)
