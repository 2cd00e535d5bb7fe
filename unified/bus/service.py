"""The callee's side: calls come in, handlers run, answers go out."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import msgspec

from unified.bus.codec import Encoded, decode, encode
from unified.bus.pool import HandlerPool
from unified.bus.registry import MethodRegistry, is_async
from unified.bus.remote import describe, describe_ours
from unified.bus.tensors import Buffer
from unified.errors import ProtocolError, RpcCancelledError, RpcError
from unified.protocol.envelope import Kind

logger = logging.getLogger(__name__)
MAX_HANDLER_THREADS = 32
TRACE: ContextVar[str] = ContextVar("unified_trace", default="")
"""Trace id of the call that is being handled."""


class InboundCall(msgspec.Struct, eq=False):
    """A call from elsewhere, until it is answered."""

    call_id: int
    sender: str
    method: str
    expires: float | None
    """On this process's monotonic clock."""
    body: Buffer
    buffers: list[Buffer]
    trace_id: str = ""
    is_relayed: bool = False
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def is_stale(self) -> bool:
        """Nobody waits for its answer any more."""
        return self.is_cancelled or (self.expires is not None and time.monotonic() >= self.expires)


Reply = Callable[[InboundCall, Kind, Encoded, bool], None]
"""Send an answer; the last argument says whether the calling thread may wait for room."""


class CallService:
    """Runs handlers: sync ones on a pool of threads, async ones on one event loop. Calls that come before `open` wait.

    Args:
        reply: sends an answer home.
        pool: for sync handlers; shared with whoever else must not block.
    """

    def __init__(self, *, registry: MethodRegistry, worker: str, node: str, reply: Reply, pool: HandlerPool) -> None:
        self._registry = registry
        self._worker = worker
        self._node = node
        self._reply = reply
        self._pool = pool
        self._loop = _LoopThread()
        self._known: dict[tuple[str, int], InboundCall] = {}
        self._early: list[InboundCall] | None = []
        self._lock = threading.Lock()

    def accept(self, call: InboundCall) -> None:
        """Take a call in; never blocks."""
        self._known[call.sender, call.call_id] = call
        with self._lock:
            if self._early is not None:
                self._early.append(call)
                return
        self._begin(call)

    def open(self) -> None:
        """The methods are registered: begin with the calls that wait."""
        with self._lock:
            early, self._early = self._early or [], None
        for call in early:
            self._begin(call)

    def cancel(self, sender: str, call_id: int) -> None:
        """The caller gave up: a call that has not begun never will, an async handler is cancelled."""
        call = self._known.get((sender, call_id))
        if call is None:
            return
        call.is_cancelled = True
        if call.task is not None:
            self._loop.run(call.task.cancel)

    def close(self) -> None:
        """Cancel async handlers and stop the loop. The pool is its owner's."""
        self._loop.close()
        self._known.clear()

    def _begin(self, call: InboundCall) -> None:
        function = self._registry.get(call.method)
        if function is not None and is_async(function):
            self._loop.run(lambda: self._start_task(call, lambda: self._invoke(call, function)))
        else:
            self._pool.submit(lambda: self._run(call))

    def _run(self, call: InboundCall) -> None:
        if call.is_stale:
            self._forget(call)
            return
        token = TRACE.set(call.trace_id)
        try:
            function = self._registry.find(call.method, self._worker)
        except RpcError as error:
            self._answer(call, Kind.ERROR, Encoded(describe_ours(error), []), True)
            return
        try:
            value = self._invoke(call, function)
            if inspect.isawaitable(value):  # a sync function that returned a coroutine
                self._loop.run(lambda: self._start_task(call, lambda: value))
                return
            kind, answer = Kind.RESULT, encode(value)
        except BaseException as error:
            kind, answer = Kind.ERROR, self._described(error)
        finally:
            TRACE.reset(token)
        self._answer(call, kind, answer, True)

    def _start_task(self, call: InboundCall, work: Callable[[], Awaitable[Any]]) -> None:
        call.task = asyncio.ensure_future(self._run_async(call, work))

    async def _run_async(self, call: InboundCall, work: Callable[[], Awaitable[Any]]) -> None:
        if call.is_stale:
            self._forget(call)
            return
        TRACE.set(call.trace_id)  # the task's own context
        try:
            kind, answer = Kind.RESULT, encode(await work())
        except asyncio.CancelledError:
            if call.is_cancelled or self._loop.is_closing:
                self._forget(call)
                raise
            ours = RpcCancelledError(f"the handler of {call.method!r} was cancelled inside worker {self._worker}.")
            kind, answer = Kind.ERROR, Encoded(describe_ours(ours), [])
        except BaseException as error:
            kind, answer = Kind.ERROR, self._described(error)
        self._answer(call, kind, answer, False)

    def _invoke(self, call: InboundCall, function: Callable[..., Any]) -> Any:
        arguments = decode(call.body, call.buffers)
        call.body, call.buffers = b"", []
        match arguments:
            case [list() as args, dict() as kwargs]:
                return function(*args, **kwargs)
        raise ProtocolError(f"the body of the call of {call.method!r} does not hold arguments.")

    def _described(self, error: BaseException) -> Encoded:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():  # ours say nothing to the caller
            trace = trace.tb_next
        theirs = error.with_traceback(trace or error.__traceback__)
        return Encoded(describe(theirs, worker=self._worker, node=self._node), [])

    def _answer(self, call: InboundCall, kind: Kind, answer: Encoded, may_wait: bool) -> None:
        self._forget(call)
        if not call.is_stale:
            self._reply(call, kind, answer, may_wait)

    def _forget(self, call: InboundCall) -> None:
        self._known.pop((call.sender, call.call_id), None)


class _LoopThread:
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
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._main, args=(self._loop,), name="bus-loop", daemon=True)
                self._thread.start()
            self._loop.call_soon_threadsafe(work)

    def close(self, timeout_s: float = 1.0) -> None:
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
