"""Call server, the callee's end of calls: calls come in, handlers run, answers go out.

An ``async def`` handler runs on the event loop, one of ``thread="main"`` on the main thread. An ``@rpc(inline=True)``
handler, or a plain function that has proven short, runs where the call was received. All others run on the pool.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from unified.bus.calls.client import CallClient
from unified.bus.calls.concurrency import ConcurrencyLimit, SenderOrder
from unified.bus.calls.deadlock.monitor import DeadlockMonitor
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.inbound import CURRENT, InboundCall, RecentReplies
from unified.bus.calls.registry import EARLY, Method, MethodRegistry, describe_method
from unified.bus.calls.remote_errors import HandlerErrors, describe_ours
from unified.bus.calls.sender import Sender
from unified.bus.codec.codec import SerializedValue, decode, encode
from unified.bus.executor import HandlerPool, LoopThread, MainThread
from unified.bus.identity import BusIdentity
from unified.bus.streams.generator import AnyGenerator, StreamSource, is_stream
from unified.bus.streams.stream import Awaited
from unified.bus.transport.io_threads import INLINE_TICKS, IoThreads
from unified.bus.transport.unix_connection import UnixConnection
from unified.errors import ProtocolError, RpcCancelledError, RpcError
from unified.protocol.envelope import Kind

logger = logging.getLogger(__name__)
MAX_HANDLER_THREADS = 32
MAX_CHAIN = 64
_OWN_LIMIT = "the running calls wait for this one. Do not call a method with a limit from its own handler."
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple})


class CallServer:
    """Runs handlers. Calls that come before `open` wait.

    Sync handlers run on `pool`, which takes over blocking work from other threads, too; short ones also run on the
    leader of `io`. `calls` has the open calls that were made here.
    """

    def __init__(
        self,
        identity: BusIdentity,
        registry: MethodRegistry,
        sender: Sender,
        calls: CallClient,
        pool: HandlerPool,
        io: IoThreads,
        main: MainThread,
    ) -> None:
        self._registry = registry
        self._worker = identity.worker
        self._reply = sender.reply
        self._pool = pool
        self._main = main
        self._io = io
        self._errors = HandlerErrors(identity.worker, identity.node, globals())
        self._loop = LoopThread()
        self._known: dict[tuple[str, int], InboundCall] = {}
        self._early: list[InboundCall] | None = []
        self._methods: dict[str, Method] = {}
        self._limits: dict[str, ConcurrencyLimit[InboundCall]] = {}
        self._order: SenderOrder[InboundCall] = SenderOrder()
        self._parked: dict[UnixConnection, list[Callable[[], object]]] = {}
        """Functions that begin the calls of full links, by link."""
        self._recent_replies = RecentReplies(identity.worker, self._reply_error)
        self._lock = threading.Lock()
        self.deadlocks = DeadlockMonitor(
            identity,
            known=self._known,
            limits=self._limits,
            lock=self._lock,
            sender=sender,
            refuse=self._refuse,
            calls=calls,
            loop=self._loop,
        )
        self._refusing = threading.local()
        pool.on_used_up = self._refuse_queued

    def accept(self, call: InboundCall) -> None:
        """Accept a call. Blocks no longer than an inline handler does."""
        self._known[call.sender, call.call_id] = call
        if self._early is not None and not call.method.startswith(EARLY):
            with self._lock:
                if self._early is not None:
                    self._early.append(call)
                    return
        self._begin(call)

    def open(self) -> None:
        """Begin the calls that wait: the methods are registered."""
        while True:
            with self._lock:  # calls that come meanwhile wait behind the early ones
                early, self._early = self._early, None if not self._early else []
            if not early:
                return
            for call in early:
                self._begin(call)

    def cancel(self, sender: str, call_id: int) -> None:
        """Cancel a call for its caller. A call that has not begun never will; an async handler is cancelled."""
        call = self._known.get((sender, call_id))
        if call is None:
            return
        call.is_cancelled = True
        if call.stream is not None:
            call.stream.close()
        elif call.task is not None:
            self._loop.run(call.task.cancel)
        elif call.deferred is not None:
            call.deferred.cancel()
        limit = call.limit
        with self._lock:
            is_queued = limit is not None and call in limit.waiting
        if is_queued:
            self._forget(call)

    def more(self, sender: str, call_id: int, count: int) -> None:
        """Note how many items of a stream the caller has consumed."""
        call = self._known.get((sender, call_id))
        if call is not None and call.stream is not None:
            call.stream.more(count)

    def caller_died(self, inbox_id: str) -> None:
        """Give up the calls of a caller that is dead."""
        for sender, call_id in list(self._known):
            if sender == inbox_id:
                self.cancel(sender, call_id)

    def link_lost(self, link: UnixConnection) -> None:
        """Give up the calls that came on a link: their answers would go nowhere."""
        for call in list(self._known.values()):
            if call.link is link:
                self.cancel(call.sender, call.call_id)
        self.resume(link)

    def resume(self, link: UnixConnection) -> None:
        """Begin the calls that waited for room on a link for their answers."""
        with self._lock:
            parked = self._parked.pop(link, [])
        for begin in parked:
            begin()

    def answers_lost(self, is_concerned: Callable[[str], bool], where: str) -> None:
        """Tell callers whose answers may be lost with a connection; see `RecentReplies.lost`."""
        self._pool.submit(lambda: self._recent_replies.lost(list(self._known.values()), is_concerned, where))

    def begin_wait(self, awaited: Awaited, task: int) -> InboundCall | int:
        """Note that this thread, or the task with this id, is about to wait; pass the result to `end_wait`."""
        call = CURRENT.get()
        if call is None:
            return self.deadlocks.begin_outside(awaited, task)
        with self._lock:
            call.waits = (*call.waits, awaited)
            deadlocked = call.limit.deadlocked() if call.limit is not None else []
        if call.is_on_loop and not task and self._loop.thread is threading.current_thread():
            self._loop.waits = (awaited,)
        for each in deadlocked:
            self._refuse(each, _OWN_LIMIT)
        method = self._methods.get(call.method)
        if method is not None:
            method.inline_policy.forget()
        return call

    def end_wait(self, who: InboundCall | int, awaited: Awaited) -> None:
        if isinstance(who, int):
            self.deadlocks.outside.pop(who, None)
        else:
            if awaited in self._loop.waits:
                self._loop.waits = ()
            with self._lock:
                waits = list(who.waits)
                waits.remove(awaited)
                who.waits = tuple(waits)

    def close(self) -> None:
        """Cancel async handlers and stop the loop. The owner of the pool closes the pool."""
        self.deadlocks.is_closed = True
        for call in list(self._known.values()):
            if call.stream is not None:
                call.stream.close()
        self._loop.close()
        self._known.clear()

    def _begin(self, call: InboundCall) -> None:
        if len(call.chain) > MAX_CHAIN:
            what = f"the call of {call.method!r} in worker {self._worker} was refused: {len(call.chain)} handlers"
            why = "each waiting for the next, led to it. Do they call one another in a cycle?"
            self._fail(call, RpcError(f"{what}, {why}"))
            return
        function = self._registry.get(call.method)
        if function is None:
            self._pool.submit(lambda: self._answer_unknown(call))
            return
        method = self._methods.get(call.method)
        if method is None or method.function is not function:
            method = self._methods[call.method] = describe_method(call.method, function, self._limits)
        if method.on_main and not self._main.will_serve:
            why = f"the main thread of worker {self._worker} is taken: let its entry point be a class without run()."
            self._fail(call, RpcError(f"{call.method!r} is marked @rpc(thread='main'), but {why}"))
            return
        if method.limit is not None:
            with self._lock:
                may_enter = method.limit.enter(call)
                deadlocked = [] if may_enter else method.limit.deadlocked()
            for each in deadlocked:
                self._refuse(each, _OWN_LIMIT)
            if not may_enter:
                if call.chain or method.limit.has_streams:
                    self.deadlocks.begin()
                return
        self._hand_on(call, method)

    def _hand_on(self, call: InboundCall, method: Method) -> None:
        if method.is_inline:
            self._run_here(call, method)
        elif method.is_async:
            self._run_on_loop(call, lambda: self._start_task(call, method))
        elif (
            method.inline_policy.is_short
            and method.limit is None
            and self._io.is_leader()
            and self._io.may_run_user_code
            and self._order.is_free(call)
            and not (call.link is not None and call.link.is_full)
        ):
            self._run_here(call, method)
        else:
            with self._lock:
                may_start = self._order.line_up(call)
            if may_start:
                self._pool.submit(partial(self._run, call, method, True))

    def _run_on_loop(self, call: InboundCall, work: Callable[[], object]) -> None:
        call.is_on_loop = True
        self._loop.run(work)
        self.deadlocks.begin()

    def _run_here(self, call: InboundCall, method: Method) -> None:
        is_leading = self._io.begin_user_code(INLINE_TICKS if method.is_inline else 1)
        try:
            self._run(call, method, False)
        finally:
            if is_leading:
                self._io.end_user_code()

    def _run(self, call: InboundCall, method: Method, in_order: bool) -> None:
        if call.is_stale:
            if in_order:
                self._start_next(call)
            self._forget(call)
            return
        if call.link is not None and call.link.is_full and not method.is_inline:
            self._park(call.link, lambda: self._pool.submit(partial(self._run, call, method, in_order)))
            return
        token, began = CURRENT.set(call), 0.0
        try:
            args, kwargs = self._arguments(call)
            began = time.perf_counter()
            if in_order:
                in_order = False
                self._start_next(call)
            run = partial(self._main.call, CURRENT, call, method.function) if method.on_main else method.function
            value = run(*args, **kwargs)
            if not call.waits:
                method.inline_policy.took(time.perf_counter() - began)
            # A caller that has the answer may call again at once: the memory of the arguments must be free by then.
            del args, kwargs
            if type(value) not in _PLAIN and self._ends_later(call, value):
                return
            kind, answer = Kind.RESULT, encode(value, devices=True)
            del value
        except BaseException as error:
            kind, answer = Kind.ERROR, self._errors.describe(call, error)
        finally:
            if in_order:
                self._start_next(call)
            CURRENT.reset(token)
        self._answer(call, kind, answer, not self._io.is_leader())

    def _park(self, link: UnixConnection, begin: Callable[[], object]) -> None:
        with self._lock:
            self._parked.setdefault(link, []).append(begin)
        if not link.is_full:  # `resume` may have run before the append
            self.resume(link)

    def _ends_later(self, call: InboundCall, value: Any) -> bool:
        """Return True if a plain handler returned a stream, a future or an awaitable: the answer comes later."""
        if is_stream(value):
            self._stream(call, value)
            return True
        if isinstance(value, Future):
            if isinstance(value, RpcFuture):  # other futures may not expect to be cancelled
                call.deferred = value
                if call.is_cancelled:
                    value.cancel()
            value.add_done_callback(lambda ended: self._answer_future(call, ended))
            return True
        if inspect.isawaitable(value):
            self._run_on_loop(call, lambda: self._follow(call, value))
            return True
        return False

    def _stream(self, call: InboundCall, generator: AnyGenerator) -> None:
        """Run the generator that a handler returned, in the context of the call."""

        def send(kind: Kind, count: int, content: SerializedValue, may_wait: bool) -> bool:
            try:
                return self._reply(call, kind, content, may_wait, count)
            except Exception as error:  # as in `_answer`
                self._reply(call, Kind.ERROR, self._errors.describe(call, error), may_wait, count)
                source.close()
                return False

        source = call.stream = StreamSource(
            generator,
            send,
            describe=partial(self._errors.describe, call),
            what=f"{call.method!r} in worker {self._worker}",
            expires=call.expires,
        )

        on_main = self._methods[call.method].on_main

        def run() -> None:
            try:
                source.run(self._pool)
            finally:
                self._pool.submit(lambda: self._forget(call)) if on_main else self._forget(call)

        async def run_async() -> None:
            try:
                await source.run_async()
            finally:
                self._forget(call)

        def begin_async() -> None:
            call.task = asyncio.create_task(run_async(), name=call.method)

        if call.is_cancelled:
            source.close()
        if source.is_async:
            self._run_on_loop(call, begin_async)
        else:
            (self._main if on_main else self._pool).submit(run)

    def _answer_future(self, call: InboundCall, ended: Future[Any]) -> None:
        """Answer with the outcome of a handler's own future, on the thread that ended it."""
        try:
            kind, answer = Kind.RESULT, encode(ended.result(), devices=True)
        except BaseException as error:
            kind, answer = Kind.ERROR, self._errors.describe(call, error)
        self._answer(call, kind, answer, False)

    def _start_next(self, call: InboundCall) -> None:
        with self._lock:
            following = self._order.started(call)
        if following is not None:
            self._pool.submit(partial(self._run, following, self._methods[following.method], True))

    def _start_task(self, call: InboundCall, method: Method) -> None:
        if call.link is not None and call.link.is_full and not call.is_stale:
            self._park(call.link, lambda: self._loop.run(lambda: self._start_task(call, method)))
            return

        async def invoke() -> Any:
            args, kwargs = self._arguments(call)
            return await method.function(*args, **kwargs)

        self._follow(call, invoke())

    def _follow(self, call: InboundCall, work: Awaitable[Any]) -> None:
        call.task = asyncio.create_task(self._run_async(call, work), name=call.method)

    async def _run_async(self, call: InboundCall, work: Awaitable[Any]) -> None:
        if call.is_stale:
            if inspect.iscoroutine(work):
                work.close()
            self._forget(call)
            return
        CURRENT.set(call)  # in the task's own context
        try:
            kind, answer = Kind.RESULT, encode(await work, devices=True)
        except asyncio.CancelledError:
            if call.is_cancelled or self._loop.is_closing:
                self._forget(call)
                raise
            ours = RpcCancelledError(f"the handler of {call.method!r} was cancelled inside worker {self._worker}.")
            kind, answer = Kind.ERROR, SerializedValue(describe_ours(ours), [])
        except BaseException as error:
            kind, answer = Kind.ERROR, self._errors.describe(call, error)
        self._answer(call, kind, answer, False)

    def _arguments(self, call: InboundCall) -> tuple[list[Any], dict[str, Any]]:
        arguments = decode(call.body, call.buffers)
        call.body = b""
        call.buffers.clear()  # not a new list: the receiving code refers to this one, too
        match arguments:
            case [list() as args, dict() as kwargs]:
                return args, kwargs
        raise ProtocolError(f"the body of the call of {call.method!r} does not hold arguments.")

    def _answer_unknown(self, call: InboundCall) -> None:
        on_missing = self._registry.on_missing
        if on_missing is not None and on_missing(call.method, lambda: self._answer_unknown(call)):
            return
        try:
            self._registry.find(call.method, self._worker)
        except RpcError as error:
            self._fail(call, error)
        else:
            self._begin(call)  # registered since

    def _refuse(self, call: InboundCall, cycle: str) -> None:
        limit = call.limit
        with self._lock:
            if limit is None or call not in limit.waiting:
                return  # admitted meanwhile, or given up
            limit.waiting.remove(call)
        what = f"the call of {call.method!r} in worker {self._worker} was refused"
        self._fail(call, RpcError(f"{what}: calls of {limit.name} wait for one another there, and {cycle}"))

    def _fail(self, call: InboundCall, error: RpcError) -> None:
        self._errors.log(call, error)
        self._answer(call, Kind.ERROR, SerializedValue(describe_ours(error), []), False)

    def _reply_error(self, call: InboundCall, error: RpcError) -> None:
        self._reply(call, Kind.ERROR, SerializedValue(describe_ours(error), []), False)

    def _answer(self, call: InboundCall, kind: Kind, answer: SerializedValue, may_wait: bool) -> None:
        self._forget(call)
        if call.is_stale:
            return
        if call.link is None:
            self._recent_replies.add(call)
        try:
            self._reply(call, kind, answer, may_wait)
        except Exception as error:  # such as a body of more than 4 GiB; its caller must not wait for ever
            self._reply(call, Kind.ERROR, self._errors.describe(call, error), may_wait)

    def _forget(self, call: InboundCall) -> None:
        if call.has_ended:
            return
        self._known.pop((call.sender, call.call_id), None)
        call.has_ended = True
        if call.limit is not None:
            with self._lock:
                # Line up under the lock that admits: the thread that admitted the later call may be faster.
                admitted = [each for each in call.limit.leave(call) if self._is_next(each)]
            self._admit(admitted)

    def _is_next(self, call: InboundCall) -> bool:
        """Return True if an admitted call may begin now; otherwise `_start_next` begins it. Under the lock."""
        method = self._methods[call.method]
        return method.is_async or method.is_inline or self._order.line_up(call)

    def _admit(self, calls: list[InboundCall]) -> None:
        for call in calls:
            method = self._methods[call.method]
            if method.is_async:
                self._hand_on(call, method)
            else:
                self._pool.submit(partial(self._run, call, method, not method.is_inline))

    def _refuse_queued(self) -> None:
        """Refuse queued calls that handlers made. All allowed threads wait for other calls, perhaps for these, and
        without a thread they might wait for ever."""
        if getattr(self._refusing, "is_here", False):
            return
        self._refusing.is_here = True
        try:
            while queued := self._pool.take_back(self._was_led_to):
                for work in queued:
                    assert isinstance(work, partial)
                    call, _, in_order = work.args
                    if in_order:
                        self._start_next(call)
                    error = RpcError(
                        f"the call of {call.method!r} in worker {self._worker} was refused: all "
                        f"{self._pool.most_threads} threads for handlers there wait for other calls, perhaps for this "
                        "one. Have fewer calls open at a time, or make handlers that wait `async def`."
                    )
                    self._fail(call, error)
        finally:
            self._refusing.is_here = False

    def _was_led_to(self, work: Callable[[], object]) -> bool:
        """Return True if work of the pool is a call that some handler made."""
        return isinstance(work, partial) and work.func == self._run and bool(work.args[0].chain)
