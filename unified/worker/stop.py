"""Stop of a worker: which code is notified, which code gets time, and how the process ends.

A stop comes twice: as a Stop order on the control channel and as SIGTERM. The order reaches the control thread even
while the main thread is stuck in C++ (a collective that will never end), where Python cannot run a signal handler.

User code that reads `should_stop`, registers a callback or brings its own SIGTERM handler gets the grace period to end
by itself; after that the agent sends SIGKILL. Other code would only waste the time, so the process ends at once, or as
soon as the checkpoint that it writes is complete. After the entry point has returned, a stop is a normal exit of the
interpreter.

After Ctrl-C, SIGINT comes in the place of SIGTERM. In user code it raises KeyboardInterrupt in the main thread, as in
any program, and the program gets the grace period.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from unified.bus.executor import CallInterrupted
from unified.protocol.worker_agent import AFTER_SAVE_S, Saving
from unified.threads import start_thread

EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_INTERRUPTED = 128 + signal.SIGINT
_MARGIN = 0.1
"""Share of the grace period to leave unused: a worker's last word must reach the agent before SIGKILL is due."""
_LOOK_S = 0.1


class StopState:
    """State of a worker's stop: whether it is asked for, whether user code watches for it, and the callbacks.

    Args:
        clean_up: called before the process is ended at once; must be quick and must not block.
        on_settled: called when a stop was asked for and all callbacks have run.
        on_saving: called when the first of several saves begins, and when the last one is over.
        grace_s, save_grace_s: seconds for a stop that gives no others.

    Attributes:
        is_asked: a stop was asked for.
        is_interrupt: the stop comes with SIGINT.
        is_finished: the program has ended.
    """

    def __init__(
        self,
        clean_up: Callable[[], None] = lambda: None,
        on_settled: Callable[[], None] = lambda: None,
        on_saving: Callable[[Saving], None] = lambda word: None,
        grace_s: float = 10.0,
        save_grace_s: float = 0.0,
    ) -> None:
        self.clean_up = clean_up
        self.on_settled = on_settled
        self.on_saving = on_saving
        self.grace_s = grace_s
        self.save_grace_s = save_grace_s
        self.fail: Callable[[BaseException], None] = lambda error: None
        """Function that ends the worker with an error, from any thread."""
        self._num_saves = 0
        self._saved_at = 0.0
        self._counting = threading.Lock()
        self.is_asked = False
        self._ordered = threading.Event()
        self._asked_at = 0.0
        self.is_interrupt = False
        self._is_in_user_code = False
        self._is_watched = False
        self.is_finished = False
        self._asks_for_time = False  # True: user code, not the runtime, has set `_is_watched`
        self._is_in_call = False
        self._is_exiting = False
        self._callbacks: list[Callable[[], None]] = []
        self._deciding = threading.Lock()
        self._settled = threading.Event()
        # SimpleQueue.put is re-entrant, so the signal handler may use it wherever it interrupts the main thread.
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._fork = threading.local()

    def watch(self) -> None:
        """Note that user code looks at `is_asked`, so that the worker gets its grace period."""
        self._is_watched = self._asks_for_time = True

    def is_asked_soon(self, within_s: float = 0.5) -> bool:
        """Return True if a stop is asked for within this time: its order may be read shortly after its signal."""
        until = time.monotonic() + within_s
        while not self.is_asked and time.monotonic() < until:
            time.sleep(0.01)
        return self.is_asked

    def await_order(self) -> bool:
        """Wait for the agent's order, for as long as the grace lasts; return whether it came."""
        return self._ordered.wait(self.left_s())

    def left_s(self) -> float:
        """Return the seconds left of the grace period, less a margin; all of it before a stop is asked for. During a
        save, `save_grace_s` is added."""
        now = time.monotonic()
        until = (self._asked_at if self.is_asked else now) + self.grace_s * (1 - _MARGIN)
        longest = until + self.save_grace_s * (1 - _MARGIN)
        after_save = min(self._saved_at + AFTER_SAVE_S * (1 - _MARGIN), longest)
        return max(0.0, (longest if self._num_saves else max(until, after_save)) - now)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Make a planned stop wait until the context is left. Any thread."""
        self._count_save(1)
        try:
            yield
        finally:
            self._count_save(-1)

    def _count_save(self, change: int) -> None:
        with self._counting:
            before, self._num_saves = self._num_saves, self._num_saves + change
            self._saved_at = time.monotonic()
            if not (before and self._num_saves):
                self.on_saving(Saving(is_over=not self._num_saves))

    def on_stop(self, callback: Callable[[], None], *, is_users: bool = True) -> None:
        """Run `callback` when a stop is asked for; at once if it was already."""
        with self._deciding:
            is_late = self._settled.is_set()
            self._is_watched = True
            self._asks_for_time |= is_users
            if not is_late:
                self._callbacks.append(callback)
        if is_late:
            callback()

    def forget_callbacks(self) -> None:
        """Forget the callbacks: the program has ended."""
        with self._deciding:
            self._callbacks.clear()

    def install(self) -> None:
        """Take SIGTERM and SIGINT, and start the thread that carries a stop out. Main thread only."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_interrupt)
        # A process that user code forks (a data loader) is not this worker: SIGTERM just ends it. The signal is blocked
        # during the fork, because Python forgets a signal that a handler took before the hook below ran.
        os.register_at_fork(
            before=self._hold_signal, after_in_parent=self._release_signal, after_in_child=self._forget_signal
        )
        start_thread("unified-stop", self._serve)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Make SIGINT raise KeyboardInterrupt inside, unless user code handles it otherwise. Main thread only."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._is_in_user_code = True
        try:
            yield
        finally:
            self._is_in_user_code = False
            signal.signal(signal.SIGINT, self._on_interrupt)

    def run_call(self, work: Callable[[], object]) -> None:
        """Run a handler on the main thread. SIGINT interrupts it; so does SIGTERM, unless user code asks for time."""
        self._is_in_call = True
        try:
            if not self.is_asked:
                work()
        finally:
            self._is_in_call = False

    def _interrupt_call(self) -> None:
        is_in_call, self._is_in_call = self._is_in_call, False
        if is_in_call:
            raise CallInterrupted

    def request(self, grace_s: float | None = None, save_grace_s: float = 0.0, *, is_interrupt: bool = False) -> None:
        """Ask for a stop; a second time changes nothing. Any thread.

        Args:
            grace_s: seconds that the agent's order gives; None: a signal came, not an order.
            save_grace_s: seconds that the order gives a save beyond them.
        """
        if grace_s is not None:
            self.grace_s, self.save_grace_s = grace_s, save_grace_s
            self._ordered.set()
        self.is_interrupt = self.is_interrupt or is_interrupt
        self._asked_at = self._asked_at or time.monotonic()
        self.is_asked = True
        self._requests.put(None)

    def finish(self) -> None:
        """Note that the entry point has returned: from now on a stop is a normal exit."""
        with self._deciding:
            self.is_finished = True

    def wait(self) -> None:
        """Block until a stop was asked for and the callbacks have run."""
        self._settled.wait()

    def begin_exit(self) -> None:
        """Note that the process is ending: further signals are ignored."""
        self._is_exiting = True

    def _serve(self) -> None:
        self._requests.get()
        while self._num_saves and self._is_unwatched() and self.left_s() > 0:
            time.sleep(_LOOK_S)
        with self._deciding:
            if self._is_unwatched():
                self.clean_up()
                flush_output(within_s=0.2)
                os._exit(EXIT_TERMINATED)
        while True:
            with self._deciding:  # the stop is settled once all callbacks have run
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._settled.set()
                    break
            for callback in callbacks:
                try:
                    callback()
                except Exception:  # the other callbacks are still called
                    traceback.print_exc()
        self.on_settled()

    def _is_unwatched(self) -> bool:
        return not (
            self._is_watched
            or self.is_finished
            or self._is_exiting
            or (self.is_interrupt and self._is_in_user_code)
            or signal.getsignal(signal.SIGTERM) != self._on_signal
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_exiting:
            return
        # A user's handler may call ours, the previous one. It then decides itself whether the program ends.
        is_own = signal.getsignal(signal.SIGTERM) == self._on_signal
        if self._is_watched or self.is_finished or self._num_saves or not is_own:
            self.request()
            if is_own and not (self._asks_for_time or self._num_saves):
                self._interrupt_call()
            return
        # No user code handles the stop: end by SIGTERM's default action, so that the parent sees the signal. Start no
        # thread here: the interrupted main thread may hold the lock that this takes.
        self.clean_up()
        _flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._is_exiting:
            self.request()
            self._interrupt_call()

    def _hold_signal(self) -> None:
        self._fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _release_signal(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._fork.mask)

    def _forget_signal(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._release_signal()


def flush_output(within_s: float) -> None:
    """Flush stdout and stderr, for at most so many seconds: a full pipe or a held lock must not delay the end."""
    try:
        helper = start_thread("unified-flush", _flush)
    except RuntimeError:  # no more threads for this user; the streams are line-buffered, so that little is lost
        return
    helper.join(within_s)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
            stream.flush()
