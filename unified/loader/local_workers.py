"""Helper processes of this worker on its own node, for a job without a loader role, or without a job.

Each stream has a process of its own, as in torch: a `ProcessPoolExecutor` of one process. The `multiprocessing` context
of the `DataLoader` starts it, or Python's default one, as in torch. Tensors come back through torch's shared memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.multiprocessing  # tensors then travel between processes through shared memory

from unified.loader.messages import FetchBatch, FetchReply, OpenStream
from unified.loader.stream_host import LoaderParts, StreamHost
from unified.threads import start_thread

END_WITHIN_S = 5.0
"""Seconds that `close` waits for a batch that is being made, before it kills the process that makes it."""


class LocalWorkers:
    """Helper processes, one a stream, each started when its stream is opened.

    Args:
        parts: the loader's. With the `fork` start method they are inherited, and need not be picklable.
        num_streams: how many.
        context: a context of `multiprocessing`; None: Python's default.
        owner: name of this process, for messages.
    """

    is_restarted = True

    def __init__(self, parts: LoaderParts, num_streams: int, *, context: BaseContext | None, owner: str) -> None:
        self._parts = parts
        self._context: Any = context or multiprocessing.get_context()
        self._owner = owner
        self._helpers: list[_Process | None] = [None] * num_streams
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._helpers)

    def initial_workers(self, num_streams: int) -> list[int]:
        return list(range(num_streams))

    def open(self, worker: int, message: OpenStream) -> None:
        self._helper(worker).submit(partial(_open, message))

    def fetch(self, worker: int, message: FetchBatch) -> Future[FetchReply]:
        return self._helper(worker).submit(partial(_fetch, message))

    def lost(self, worker: int, error: BaseException) -> str:
        if not isinstance(error, BrokenProcessPool):
            return ""
        helper, self._helpers[worker] = self._helpers[worker], None
        pid = helper.close(is_lost=True) if helper is not None else None
        if pid is None:
            return f"helper {worker} of {self._owner} could not be started: see what it printed above."
        return f"helper {worker} of {self._owner} (pid {pid}) ended unexpectedly: was it killed, or out of memory?"

    def close(self) -> None:
        if os.getpid() != self._pid:  # after a fork: they belong to the other process
            return
        helpers, self._helpers = self._helpers, []
        for helper in helpers:
            if helper is not None:
                helper.close()

    def _helper(self, worker: int) -> _Process:
        helper = self._helpers[worker]
        if helper is None:
            name = f"helper {worker} of {self._owner}"
            parts: Any = self._parts if self._context.get_start_method() == "fork" else _PackedParts(self._parts)
            helper = self._helpers[worker] = _Process(self._context, parts, name)
        return helper


class _Process:
    """One process, and the futures of its requests."""

    def __init__(self, context: Any, parts: Any, name: str) -> None:
        self._executor = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(parts, name))
        self._pid = self._executor.submit(os.getpid)
        self._asked: set[Future[Any]] = set()

    def submit(self, work: Any) -> Future[Any]:
        future: Future[Any]
        try:
            future = self._executor.submit(work)
        except BrokenProcessPool as error:  # it ended between requests: handled as an end at work
            future = Future()
            future.set_exception(error)
            return future
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return future

    def close(self, *, is_lost: bool = False) -> int | None:
        """End the process, and wait for that; return its pid if it ever had one.

        Args:
            is_lost: the process ended by itself, and its executor fails the requests. Cancelling them meanwhile would
                end the executor's thread before it has closed its pipes.
        """
        asked = list(self._asked)
        for future in [] if is_lost else asked:
            future.cancel()
        late = wait([self._pid, *asked], END_WITHIN_S).not_done  # the pid is not cancelled: it says whom to kill
        pid = self._pid.result() if self._pid.done() and self._pid.exception() is None else None
        if late and pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._executor.shutdown(wait=True, cancel_futures=not is_lost)
        return pid


class _PackedParts:
    """Loader parts on their way to a process that inherits nothing: by value if necessary."""

    def __init__(self, parts: LoaderParts) -> None:
        self._packed = parts.pack()

    def __reduce__(self) -> Any:
        return pickle.loads, (self._packed,)


# In the helper process

_host: StreamHost | None = None


def _begin(parts: LoaderParts, name: str) -> None:
    global _host
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start_thread("loader-parent", _end_with_parent)
    torch.set_num_threads(1)
    _host = StreamHost(lambda: parts, where=name)


def _end_with_parent() -> None:
    """End with the parent: an executor's process waits on a pipe that stays open when the parent ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _open(message: OpenStream) -> None:
    assert _host is not None
    _host.open(message)


def _fetch(message: FetchBatch) -> FetchReply:
    assert _host is not None
    return _host.fetch(message)
