"""I/O threads of the Unix connections, leader and followers, which also run handlers that have proven short.

One thread at a time *leads*: it polls all connections, reads messages, and hands them on. While it runs user code,
another thread may become the leader: at once if that code waits for the bus, otherwise when `tick` finds it still
running a moment later. So a short handler costs no change of thread, and no handler can stop the bus.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from unified.bus.transport.framing import Frames
from unified.bus.transport.unix_connection import Spin, TransportEvents, UnixConnection
from unified.threads import CLOSE_WITHIN_S, TimerThread, call_guarded

logger = logging.getLogger(__name__)
TICK_S = 0.002
"""Approximate time for which a handler may hold up the rest."""
LEFT_TICKS = 8
"""Ticks for which answers that nobody waits for stay unread: another receiver would disturb a thread with many
calls."""
SENDING_TICKS = 50
"""`LEFT_TICKS` while that thread keeps sending."""
INLINE_TICKS = 25
"""Ticks for which an inline handler keeps the lead: its callers rely on one running after the other, even if the system
takes the core away for some milliseconds."""
MAX_THREADS = 64
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class IoThreads:
    """Threads that lead in turn: one at first, more while handlers occupy earlier ones.

    Without a listening Unix socket there are only connections that this side makes. For `full_bytes` see
    `UnixConnection`.
    """

    def __init__(self, listener: socket.socket | None, full_bytes: int) -> None:
        self._listener = listener
        self._full_bytes = full_bytes
        self._events: TransportEvents
        self._timer = TimerThread("bus-tick", self._on_tick, stays=True)
        self._is_tick_due = False
        self._epoll = select.epoll()
        self._spin = Spin()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connections: dict[int, UnixConnection] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        """Callbacks for other files that become readable."""
        self._unread: dict[UnixConnection, tuple[int, int]] = {}
        """Connections that nobody reads since a waiting thread left them: `num_reads` when last seen, and ticks since
        then."""
        self._messages: deque[tuple[UnixConnection, Frames]] = deque()
        self._lock = threading.RLock()
        self._leading = threading.Lock()
        """Guards the choice of the leader."""
        self._leader = 0
        self._code_number = 0
        self._runs_code = False
        self._seen_code_number = 0
        self._ticks_left = 0
        """Ticks until another thread takes the lead from the running code."""
        self._promoted = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._num_spare = 0
        self._num_alive = 0
        self._is_accepting_paused = False
        """True while accepting is paused, because no descriptors were left."""
        self._was_accepting_paused = False
        self._is_closing = False
        self._is_closed = False
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        if listener is not None:
            listener.setblocking(False)
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    def start(self, events: TransportEvents) -> None:
        self._events = events
        with self._leading:
            self._promote()

    def add(self, connection: UnixConnection) -> None:
        """Receive from this connection too; after `close` it is closed at once."""
        with self._lock:
            is_late = self._is_closing
            if not is_late:
                self._connections[connection.fd] = connection
        if is_late:
            connection.close()
        else:
            self.watch(connection)

    def remove(self, connection: UnixConnection) -> None:
        """Forget a connection. Call this before its descriptor may be reused."""
        with self._lock:
            self._unread.pop(connection, None)
            if self._connections.get(connection.fd) is connection:
                del self._connections[connection.fd]
                self._watch(connection, 0)

    def watch(self, connection: UnixConnection) -> None:
        """Poll for what the connection wants now (`events`)."""
        with self._lock:
            if self._connections.get(connection.fd) is connection:
                self._watch(connection, connection.events)

    def _watch(self, connection: UnixConnection, events: int) -> None:
        if events == connection.watched:
            return
        before, connection.watched = connection.watched, events  # first: a signal handler may watch it, too
        if not events:  # modified to no events, it would still report its end, again and again
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(connection.fd)
        elif before:
            self._epoll.modify(connection.fd, events)
        else:
            self._epoll.register(connection.fd, events)

    def watch_file(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Have the leader call `on_ready()`, which must not wait, whenever this file can be read."""
        self._watched[fd] = on_ready
        with contextlib.suppress(ValueError):  # closed
            self._epoll.register(fd, select.EPOLLIN)

    def unwatch_file(self, fd: int) -> None:
        """Undo `watch_file`. Call this before the descriptor may be reused."""
        self._watched.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    @property
    def connections(self) -> list[UnixConnection]:
        with self._lock:
            return list(self._connections.values())

    def left(self, connection: UnixConnection) -> None:
        """Read a connection that a waiting thread stopped reading, unless a thread reads it again soon."""
        if connection not in self._unread:
            self._unread[connection] = (connection.num_reads, 0)
            self.tick_soon()

    def begin_user_code(self, num_ticks: int = 1) -> bool:
        """Note that user code begins on this thread. If it leads, another may lead after `num_ticks` ticks.

        Return False if this thread does not lead, or runs user code already: then do not call `end_user_code`.
        """
        if self._leader != threading.get_ident() or self._runs_code:
            return False
        self._code_number += 1
        self._ticks_left = num_ticks
        self._runs_code = True
        if not self._is_tick_due:
            self.tick_soon()
        return True

    def end_user_code(self) -> None:
        with self._leading:
            if self._leader == threading.get_ident():
                self._runs_code = False

    def hand_over(self) -> bool:
        """Have another thread lead: the code on this one is about to wait. Return False if this one does not lead."""
        if self._leader != threading.get_ident():
            return False
        with self._leading:
            if self._runs_code and self._leader == threading.get_ident():
                self._promote()
        return True

    @property
    def may_run_user_code(self) -> bool:
        """True if user code may run on the leader: there are other threads to take its place."""
        return len(self._threads) < MAX_THREADS or self._num_spare > 0

    def is_leader(self) -> bool:
        return self._leader == threading.get_ident()

    @property
    def has_more(self) -> bool:
        """True if received messages wait to be handed on."""
        return bool(self._messages)

    def tick(self) -> bool:
        """Check unread connections, long user code and paused accepting; return False if there is nothing to check."""
        now = time.monotonic() if self._unread else 0.0
        for connection, (num_reads, num_ticks) in list(self._unread.items()):
            if connection.num_reads != num_reads or connection.reader:
                self._unread[connection] = (connection.num_reads, 0)
            elif num_ticks < (SENDING_TICKS if now - connection.sent_at < 2 * TICK_S else LEFT_TICKS):
                self._unread[connection] = (num_reads, num_ticks + 1)
            else:
                self._unread.pop(connection, None)
                connection.attach()
        if self._is_accepting_paused and self._listener is not None and not self._is_closing:
            self._is_accepting_paused = False
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        with self._leading:
            if self._runs_code and self._code_number == self._seen_code_number:
                self._ticks_left -= 1
                if self._ticks_left <= 0:
                    self._promote()
            self._seen_code_number = self._code_number
        return bool(self._unread) or self._runs_code or self._is_accepting_paused

    def close(self) -> None:
        """End the threads, close the listener and all connections. A thread inside a handler ends when that does."""
        self._timer.close(CLOSE_WITHIN_S)
        with self._lock:
            self._is_closing = True
        with self._leading:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)
            threads = list(self._threads)
        for _ in threads:
            self._promoted.release()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(0.2)
        for connection in self.connections:
            connection.close()
        if self._listener is not None:
            self._listener.close()
        self._close_if_last()

    def abandon(self) -> None:
        """In a forked child: close this process's copies of all files, and touch nothing that the parent shares."""
        self._is_closing = self._is_closed = True
        for connection in list(self._connections.values()):
            connection.abandon()
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()
        os.close(self._wake_fd)

    def _close_if_last(self) -> None:
        with self._leading:
            if self._is_closing and self._num_alive == 0 and not self._is_closed:
                self._is_closed = True
                self._epoll.close()
                os.close(self._wake_fd)

    def tick_soon(self) -> None:
        """Schedule one call of `tick` and `TransportEvents.idle`, unless one is scheduled."""
        if not self._is_tick_due:
            self._is_tick_due = True
            try:
                self._timer.set(time.monotonic())
            except BaseException:  # such as KeyboardInterrupt: the timer may not be set
                self._is_tick_due = False
                raise

    def _on_tick(self) -> None:
        self._is_tick_due = False  # first: code that begins after this asks again
        if self.tick():
            self._is_tick_due = True
            self._timer.set(time.monotonic() + TICK_S)
        self._events.idle()

    def _promote(self) -> None:
        """Have another thread lead; under `_leading`."""
        if self._is_closing:
            return
        if self._num_spare == 0:
            thread = threading.Thread(target=self._follow, name=f"bus-io-{len(self._threads)}", daemon=True)
            self._threads.append(thread)  # first: an interrupt may come during `start`
            self._num_alive += 1
            try:
                thread.start()
            except RuntimeError:  # no thread can be had: this one still leads
                self._threads.remove(thread)
                self._num_alive -= 1
                raise
        else:
            self._num_spare -= 1
        self._leader, self._runs_code = 0, False
        self._promoted.release()

    def _follow(self) -> None:
        while True:
            self._promoted.acquire()
            with self._leading:
                if self._is_closing:
                    self._num_alive -= 1
                    break
                me = self._leader = threading.get_ident()
            while self._leader == me and not self._is_closing:
                if not call_guarded("receiver-failed", self._lead, me):
                    self.end_user_code()
            with self._leading:
                self._num_spare += 1
        self._close_if_last()

    def _lead(self, me: int) -> None:
        """Hand on received messages, then wait for more. Return when another thread leads."""
        while self._messages:
            connection, frames = self._messages.popleft()
            self._events.message_came(connection, frames)
            if self._leader != me:
                return
        self._events.idle()
        for fd, events in self._spin.look(self._epoll.poll) or self._epoll.poll():
            if fd == self._wake_fd:
                return
            found = self._connections.get(fd)
            if found is None:
                if self._listener is not None and fd == self._listener.fileno():
                    self._accept(self._listener)
                elif fd in self._watched:
                    self._watched[fd]()
                continue
            if events & select.EPOLLOUT:
                found.flush()
                self.watch(found)
            if events & ~select.EPOLLOUT:
                if not found.read():  # another thread reads it: stop its repeated events
                    found.detach()
                    self.left(found)
                if self._leader != me:
                    return

    def deliver(self, connection: UnixConnection, frames: Frames) -> None:
        """Queue a message from a peer's connection, read by the leader."""
        self._messages.append((connection, frames))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                self._pause_accepting(listener, error)
            return
        self.add(UnixConnection(connected, self, self._events, full_bytes=self._full_bytes))

    def _pause_accepting(self, listener: socket.socket, error: OSError) -> None:
        """Accept no more until the next tick: a waiting peer would be reported again and again."""
        if not self._was_accepting_paused:
            self._was_accepting_paused = True
            logger.warning("event=cannot-accept reason=%r (it is tried again, and only said once)", str(error))
        self._epoll.unregister(listener.fileno())
        self._is_accepting_paused = True
        self.tick_soon()
