"""I/O threads of the Unix connections, leader and followers, which also run the handlers that have shown to be short.

One thread at a time *leads*: it polls all connections, reads what comes, and hands it on. While it runs user code,
another thread may become the leader: at once if that code waits for the bus, else when `tick` finds it still there a
moment later. So short handlers cost no change of thread, and none can stop the bus.
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
from unified.threads import CLOSE_WITHIN_S, TimerThread, call_guarded, start_thread

logger = logging.getLogger(__name__)
TICK_S = 0.002
"""Time for which a handler may hold up the rest, about."""
LEFT_TICKS = 8
"""Ticks for which answers may lie that nobody waits for: a thread that makes many calls would be disturbed by another
that receives their answers meanwhile."""
SENDING_TICKS = 50
"""`LEFT_TICKS` while that thread keeps sending."""
INLINE_TICKS = 25
"""Ticks for which an inline handler keeps the lead: its callers count on one running after the other, also where the
system takes its core away for some milliseconds in the midst of one."""
MAX_THREADS = 64
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class IoThreads:
    """Threads that lead in turn: one at first, more while handlers keep earlier ones.

    Args:
        listener: of this process's Unix socket; None: only connections that this side makes.
        full_bytes: see `UnixConnection`.
    """

    def __init__(self, listener: socket.socket | None, full_bytes: int) -> None:
        self._listener = listener
        self._full_bytes = full_bytes
        self._events: TransportEvents
        self._timer = TimerThread("bus-tick", self._on_tick, stays=True)
        self._is_tick_due = False
        self._epoll = select.epoll()
        self._spin = Spin()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._links: dict[int, UnixConnection] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        """Callbacks for other files that can be read."""
        self._left: dict[UnixConnection, tuple[int, int]] = {}
        """Connections that nobody reads since a waiting thread left them: how often they had been read when last seen,
        and for how many ticks it was as often."""
        self._mail: deque[tuple[UnixConnection, Frames]] = deque()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Guards the choice of the leader."""
        self._leader = 0
        self._loan = 0
        """Number of the user code that runs."""
        self._lent = False
        self._seen_loan = 0
        self._ticks_left = 0
        """Ticks until another thread leads instead of the code that runs."""
        self._wanted = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._num_spare = 0
        self._num_alive = 0
        self._is_ticking = False
        self._is_deaf = False
        """No file numbers were left to accept connections with."""
        self._was_deaf = False
        self._is_closing = False
        self._is_closed = False
        self._epoll.register(self._bell, select.EPOLLIN)
        if listener is not None:
            listener.setblocking(False)
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    def start(self, events: TransportEvents) -> None:
        """Begin to receive."""
        self._events = events
        with self._turn:
            self._pass_on()

    def add(self, link: UnixConnection) -> None:
        """Receive from this connection too; after `close` it is closed at once."""
        with self._lock:
            is_late = self._is_closing
            if not is_late:
                self._links[link.fd] = link
        if is_late:
            link.close()
        else:
            self.watch(link)

    def remove(self, link: UnixConnection) -> None:
        """Forget a connection; to be called before its number may become another file's."""
        with self._lock:
            self._left.pop(link, None)
            if self._links.get(link.fd) is link:
                del self._links[link.fd]
                self._watch(link, 0)

    def watch(self, link: UnixConnection) -> None:
        """Poll for what the connection wants now (`events`)."""
        with self._lock:
            if self._links.get(link.fd) is link:
                self._watch(link, link.events)

    def _watch(self, link: UnixConnection, events: int) -> None:
        if events == link.watched:
            return
        if not events:  # a link that is only modified to nothing still reports its end, again and again
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(link.fd)
        elif link.watched:
            self._epoll.modify(link.fd, events)
        else:
            self._epoll.register(link.fd, events)
        link.watched = events

    def watch_file(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Have the thread that leads call `on_ready()`, which must not wait, whenever this file can be read."""
        self._watched[fd] = on_ready
        with contextlib.suppress(ValueError):  # closed
            self._epoll.register(fd, select.EPOLLIN)

    def unwatch_file(self, fd: int) -> None:
        """Undo `watch_file`; to be called before the number may become another file's."""
        self._watched.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    @property
    def links(self) -> list[UnixConnection]:
        with self._lock:
            return list(self._links.values())

    def left(self, link: UnixConnection) -> None:
        """Read a connection again, which a waiting thread stopped reading, if none comes back soon."""
        if link not in self._left:
            self._left[link] = (link.num_reads, 0)
            self._keep_ticking()

    def lend(self, num_ticks: int = 1) -> bool:
        """Take in that user code begins on this thread: if it leads, another may lead until `take_back`, once so many
        ticks have found it still there.

        Returns False, and no `take_back` is due, where this thread does not lead.
        """
        if self._leader != threading.get_ident() or self._lent:
            return False
        self._loan += 1
        self._ticks_left = num_ticks
        self._lent = True
        if not self._is_ticking:
            self._keep_ticking()
        return True

    def take_back(self) -> None:
        """Take in that the user code has ended."""
        with self._turn:
            if self._leader == threading.get_ident():
                self._lent = False

    def pass_on_now(self) -> bool:
        """Have another thread lead, since the code on this one is about to wait. False if this one does not lead."""
        if self._leader != threading.get_ident():
            return False
        with self._turn:
            if self._lent and self._leader == threading.get_ident():
                self._pass_on()
        return True

    @property
    def may_run(self) -> bool:
        """True if user code may run on the leader: there are other threads to take its place."""
        return len(self._threads) < MAX_THREADS or self._num_spare > 0

    def is_leader(self) -> bool:
        return self._leader == threading.get_ident()

    @property
    def has_mail(self) -> bool:
        """True if more has come and is to be handed on."""
        return bool(self._mail)

    def tick(self) -> bool:
        """Look after what was left alone too long; return False when there is nothing to look after."""
        self._is_ticking = False  # first: what begins from here on calls for ticks itself
        now = time.monotonic() if self._left else 0.0
        for link, (num_reads, num_ticks) in list(self._left.items()):
            if link.num_reads != num_reads or link.reader:
                self._left[link] = (link.num_reads, 0)
            elif num_ticks < (SENDING_TICKS if now - link.sent_at < 2 * TICK_S else LEFT_TICKS):
                self._left[link] = (num_reads, num_ticks + 1)
            else:
                self._left.pop(link, None)
                link.attach()
        if self._is_deaf and self._listener is not None and not self._is_closing:
            self._is_deaf = False
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        with self._turn:
            if self._lent and self._loan == self._seen_loan:
                self._ticks_left -= 1
                if self._ticks_left <= 0:
                    self._pass_on()
            self._seen_loan = self._loan
        if self._left or self._lent or self._is_deaf:
            self._is_ticking = True
        return self._is_ticking

    def close(self) -> None:
        """End the threads, close the listener and all connections. A thread inside a handler ends when that does."""
        self._timer.close(CLOSE_WITHIN_S)
        with self._lock:
            self._is_closing = True
        with self._turn:
            if not self._is_closed:
                os.eventfd_write(self._bell, 1)
            threads = list(self._threads)
        for _ in threads:
            self._wanted.release()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(0.2)
        for link in self.links:
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._close_if_last()

    def abandon(self) -> None:
        """In a forked child: close this process's copies of all files, and touch nothing that the parent shares."""
        self._is_closing = self._is_closed = True
        for link in list(self._links.values()):
            link.abandon()
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()
        os.close(self._bell)

    def _close_if_last(self) -> None:
        with self._turn:
            if self._is_closing and self._num_alive == 0 and not self._is_closed:
                self._is_closed = True
                self._epoll.close()
                os.close(self._bell)

    def _keep_ticking(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self.tick_soon()

    def tick_soon(self) -> None:
        """Have `tick` and `TransportEvents.idle` called once, unless they are about to be."""
        if not self._is_tick_due:
            self._is_tick_due = True
            self._timer.set(time.monotonic())

    def _on_tick(self) -> None:
        self._is_tick_due = False  # first: what begins from here on asks again
        if self.tick():
            self._is_tick_due = True
            self._timer.set(time.monotonic() + TICK_S)
        self._events.idle()

    def _pass_on(self) -> None:
        """Have another thread lead; under `_turn`."""
        if self._is_closing:
            return
        if self._num_spare == 0:
            name = f"bus-io-{len(self._threads)}"
            thread = start_thread(name, self._stand_by)  # first: where no thread can be had, this one still leads
            self._threads.append(thread)
            self._num_alive += 1
        else:
            self._num_spare -= 1
        self._leader, self._lent = 0, False
        self._wanted.release()

    def _stand_by(self) -> None:
        while True:
            self._wanted.acquire()
            with self._turn:
                if self._is_closing:
                    self._num_alive -= 1
                    break
                me = self._leader = threading.get_ident()
            while self._leader == me and not self._is_closing:
                if not call_guarded("receiver-failed", self._lead, me):
                    self.take_back()
            with self._turn:
                self._num_spare += 1
        self._close_if_last()

    def _lead(self, me: int) -> None:
        """Hand on what has come, then wait for more. Returns when another thread leads."""
        while self._mail:
            link, frames = self._mail.popleft()
            self._events.message_came(link, frames)
            if self._leader != me:
                return
        self._events.idle()
        for fd, events in self._spin.look(self._epoll.poll) or self._epoll.poll():
            if fd == self._bell:
                return
            link_or_none = self._links.get(fd)
            if link_or_none is None:
                if self._listener is not None and fd == self._listener.fileno():
                    self._accept(self._listener)
                elif fd in self._watched:
                    self._watched[fd]()
                continue
            if events & select.EPOLLOUT:
                link_or_none.flush()
                self.watch(link_or_none)
            if events & ~select.EPOLLOUT:
                if not link_or_none.read():  # another thread is at it: do not be called for it again and again
                    link_or_none.detach()
                    self.left(link_or_none)
                if self._leader != me:
                    return

    def deliver(self, link: UnixConnection, frames: Frames) -> None:
        """Queue a message from a peer's connection, read by the leader."""
        self._mail.append((link, frames))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                self._be_deaf(listener, error)
            return
        self.add(UnixConnection(connected, self, self._events, full_bytes=self._full_bytes))

    def _be_deaf(self, listener: socket.socket, error: OSError) -> None:
        """Accept no more until the next tick: whoever waits to be accepted would be reported again and again."""
        if not self._was_deaf:
            self._was_deaf = True
            logger.warning("event=cannot-accept reason=%r (it is tried again, and only said once)", str(error))
        self._epoll.unregister(listener.fileno())
        self._is_deaf = True
        self._keep_ticking()
