"""An event loop for async handlers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class LoopThread:
    """An event loop on a daemon thread, made when the first async handler is called."""

    def __init__(self) -> None:
        self.is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` on the loop, soon; after `close` it is dropped."""
        with self._lock:
            if self.is_closing:
                return
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._main, args=(loop,), name="bus-loop", daemon=True)
                thread.start()
                self._loop, self._thread = loop, thread
            self._loop.call_soon_threadsafe(work)

    def close(self, timeout_s: float = 1.0) -> None:
        """Cancel what runs on it, and end it."""
        with self._lock:
            self.is_closing = True
            loop, thread = self._loop, self._thread
            if loop is None or thread is None:
                return
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(timeout_s)

    @staticmethod
    def _main(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=0.5) if tasks else asyncio.sleep(0))
        finally:
            loop.close()
