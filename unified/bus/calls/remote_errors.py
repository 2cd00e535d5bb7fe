"""Errors of handlers: encoded at the callee, raised at the caller."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import threading
import time
import traceback
from typing import Any

import msgspec

from unified.bus.buffers import Buffer
from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.registry import is_runtimes
from unified.bus.codec.codec import SerializedValue
from unified.bus.codec.pickling import are_refused, raise_if_signal
from unified.bus.executor import CallInterrupted
from unified.config.logging import LogOnce
from unified.errors import (
    BusOverloadedError,
    ProtocolError,
    RemoteError,
    RouteLostError,
    RpcCancelledError,
    RpcError,
    RpcNotFoundError,
)
from unified.protocol.framing import UNREADABLE
from unified.values import Value

logger = logging.getLogger(__name__)
MAX_TEXT = 64 * 1024
REPEAT_S = 60.0
"""Seconds without a failure after which the same failure is logged again."""
_OURS: dict[str, type[RpcError]] = {
    cls.__name__: cls for cls in (RpcNotFoundError, BusOverloadedError, RpcCancelledError, RouteLostError)
}
"""Errors of the callee's bus itself; the caller gets them as they are."""
_FACTS = ("type_name", "traceback", "worker", "node")
_UNFIT = (StopIteration, StopAsyncIteration)
"""Exceptions that an asyncio future refuses; GeneratorExit and the like are no `Exception`, and left out anyway."""


class Raised(Value, frozen=True, kw_only=True):
    """Body of an ERROR."""

    from_bus: bool
    """True if the callee's bus made the error; no handler raised it."""
    type_name: str
    message: str
    traceback: str = ""
    worker: str = ""
    node: str = ""
    pickled: bytes = b""
    """The exception itself, where it can be pickled."""
    group_message: str = ""
    members: tuple[Raised, ...] = ()
    """Members of an exception group. Each arrives, even if the group or another member cannot be pickled."""


class HandlerErrors:
    """Errors that handlers raise: encoded for their callers, and logged where they happened.

    An error of a new method and kind is logged with its traceback: its caller may not log it. Repeated ones are not.
    """

    def __init__(self, worker: str, node: str, ours: dict[str, Any]) -> None:
        self._worker = worker
        self._node = node
        self._ours = ours
        self._said = LogOnce(forget_s=REPEAT_S)
        self._lock = threading.Lock()

    def describe(self, call: InboundCall, error: BaseException) -> SerializedValue:
        """Return the answer to a call whose handler raised; a CallInterrupted is raised again."""
        if isinstance(error, CallInterrupted):
            raise error
        body = describe(error, worker=self._worker, node=self._node, ours=self._ours)
        with contextlib.suppress(Exception):  # a user's log handler may raise, and the caller would wait for ever
            self.log(call, error)
        return SerializedValue(body, [])

    def log(self, call: InboundCall, error: BaseException) -> None:
        """Log that a call ended in an error here; errors of the runtime's own methods are left to their callers."""
        if is_runtimes(call.method):
            return
        with self._lock:
            is_new = self._said.is_new(time.monotonic(), f"{call.method}: {type(error).__name__}")
        if is_new:
            logger.warning(
                "event=rpc-handler-failed worker=%s method=%r caller=%s (its caller is told each time; more like it "
                "are not logged)\n%s",
                self._worker,
                call.method,
                call.worker,
                error_text(error).rstrip(),
            )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Raised)


def describe(error: BaseException, *, worker: str, node: str, ours: dict[str, Any]) -> bytes:
    """Return the body of an ERROR for an exception of a handler. Never fails, even if the exception's own methods do.

    Frames of the module that called the handler, whose globals are `ours`, are left out: the caller does not need them.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is ours:
        trace = trace.tb_next
    if trace is None:  # raised by the call itself, not within the handler
        _point_out_option(error)
    else:
        BaseException.with_traceback(error, trace)
    try:
        return _encoder.encode(_raised(error, worker, node))
    except BaseException as second:  # such as groups that are nested too deeply, or a pickle of more than 4 GiB
        name = type.__dict__["__name__"].__get__(type(error))
        lost = f"{error_text(error)}\nOnly its text could be sent: {_text(second)}"
        raised = Raised(from_bus=False, type_name=name, message=_text(error), traceback=lost, worker=worker, node=node)
        return _encoder.encode(raised)


def _raised(error: BaseException, worker: str, node: str) -> Raised:
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    members = tuple(_raised(each, worker, node) for each in group)  # before the texts: those of a deep group take long
    return Raised(
        from_bus=False,
        type_name=_type_name(error),
        message=_text(error),
        traceback=error_text(error),
        worker=worker,
        node=node,
        pickled=_pickled(error),
        group_message=_utf8(BaseExceptionGroup.message.__get__(error)) if members else "",
        members=members,
    )


def describe_ours(error: RpcError) -> bytes:
    """Return the body of an ERROR for an error of the bus itself."""
    return _encoder.encode(Raised(from_bus=True, type_name=type(error).__name__, message=_text(error)))


def rebuild(body: Buffer, what: str) -> RpcError:
    """Return the error that the caller of `what` gets; ProtocolError: `describe` did not make the body."""
    try:
        raised = _decoder.decode(body)
    except UNREADABLE as unreadable:
        raise ProtocolError(f"not the body of an ERROR: {unreadable}") from None
    if raised.from_bus:
        return _OURS.get(raised.type_name, RpcError)(raised.message)
    error = _rebuilt(raised)
    where = f"worker {raised.worker}" + (f" on node {raised.node}" if raised.node else "")
    error.add_note(f"{what} raised {raised.type_name} in {where}:\n{raised.traceback.rstrip()}")
    return error


def _rebuilt(raised: Raised) -> RemoteError:
    facts = {name: getattr(raised, name) for name in _FACTS}
    far = _unpickled(raised.pickled)
    if raised.members:
        kind = type(far) if isinstance(far, ExceptionGroup) else ExceptionGroup
        group = ExceptionGroup.__new__(kind, raised.group_message, [_rebuilt(each) for each in raised.members])
        group.__dict__.update(far.__dict__ if far is not None else {})
        far = group
    return RemoteError(raised.message, **facts) if far is None else raise_as(far, raised.message, facts)


def summary(body: Buffer) -> str:
    """Return type and message of an error in one line."""
    raised = _decoder.decode(body)
    return f"{raised.type_name}: {raised.message}"


def raise_as(far: Exception, message: str, facts: dict[str, str]) -> RemoteError:
    """Make a `RemoteError` that is also an instance of the class of `far`, with its arguments and attributes."""
    base: Any = getattr(type(far), "far_class", type(far))
    try:
        cls = _both(base)
        native = _native(base)
        arguments = native.__reduce__(far)[1]  # also those that `args` lacks, such as the filename of an OSError
        both = _native(cls.__base__).__new__(cls, *arguments)
        native.__init__(both, *arguments)
        both.args = far.args
        both.__dict__.update(far.__dict__ | facts | {"message": message, "far": far})
        if not isinstance(getattr(both, "__notes__", []), list):  # `add_note` would refuse
            both.__notes__ = []
    except BaseException as refused:  # a user's class may refuse to be subclassed
        raise_if_signal(refused)
        return RemoteError(message, **facts)
    error: RemoteError = both
    return error


def _point_out_option(error: BaseException) -> None:
    """Add a note if an unexpected argument may have been meant as an option of the call."""
    for option in ("timeout", "retries"):
        if type(error) is TypeError and f"unexpected keyword argument '{option}'" in _text(error):
            error.add_note(
                f"Did you mean the option of the call? It is written `_{option}=`, or given by "
                f"`with_options({option}=…)`; to a proxy, when it is made."
            )


@functools.cache
def _both(cls: type[Exception]) -> Any:
    """Return the subclass of both RemoteError and `cls`, the same object each time."""

    def to_text(self: RemoteError) -> str:
        return self.message

    def reduce(self: Any) -> Any:
        facts = {name: getattr(self, name) for name in _FACTS}
        return raise_as, (self.far, self.message, facts)

    hidden = dict.fromkeys((*_FACTS, "message", "far"))  # read-only ones of `cls`, such as the message of a group
    body = hidden | {"__str__": to_text, "__reduce__": reduce, "far_class": cls, "__module__": RemoteError.__module__}
    return type(f"Remote{cls.__name__}", (RemoteError, cls), body)


def _native(cls: type[Exception]) -> Any:
    """Return the nearest base that is written in C, whose own `__init__` sets its fields (`errno` of OSError)."""
    return next(base for base in cls.__mro__ if base.__module__ == "builtins")


def _pickled(error: BaseException) -> bytes:
    if not isinstance(error, Exception) or isinstance(error, _UNFIT):
        return b""
    try:
        return pickle.dumps(error, protocol=5)
    except BaseException:  # a lock in it, a local class: type, message and traceback still arrive
        return b""


def _unpickled(data: bytes) -> Exception | None:
    if not data or are_refused():
        return None
    try:
        error = pickle.loads(data)
    except BaseException as refused:  # its class is not importable here, or its __init__ wants other arguments
        raise_if_signal(refused)
        return None
    return error if isinstance(error, Exception) else None


def _text(error: BaseException) -> str:
    try:
        return _utf8(str(error)[:MAX_TEXT])
    except BaseException as second:
        return f"<its __str__ raised {type(second).__name__}>"


def error_text(error: BaseException) -> str:
    """Return the traceback of an error (its last `MAX_TEXT` characters), or a note that it cannot be formatted."""
    try:
        return _utf8("".join(traceback.format_exception(error))[-MAX_TEXT:])
    except BaseException as second:
        return f"<its traceback cannot be formatted: {type(second).__name__}>"


def _type_name(error: BaseException) -> str:
    """Return the type name of an error; if it came from another worker, that of the original error."""
    if isinstance(error, RemoteError) and error.type_name:
        return error.type_name
    cls = type(error)
    return _utf8(cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}")


def _utf8(text: str) -> str:
    """Return the text with escapes in place of lone surrogates, which UTF-8 and so MessagePack cannot express."""
    return str.encode(text, errors="backslashreplace").decode()
