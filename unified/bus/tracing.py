"""Spans of calls, for workers with ``UNIFIED_TRACE=calls`` or, for one call in a hundred, ``UNIFIED_TRACE=calls:0.01``.

Each call has a span of its caller and one of its callee, each in a file beside that worker's log. Sampling uses the id
of the first call of a chain: a call and its handler's calls are all there, or none. Without the variable, nothing here
runs.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from unified.bus.calls.client import CallClient
from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.registry import is_runtimes
from unified.bus.calls.remote_errors import summary
from unified.bus.calls.sender import OutboundCall
from unified.bus.calls.server import CallServer
from unified.bus.codec.codec import SerializedValue
from unified.bus.otel import OtelExporter, exporters
from unified.errors import OptionError
from unified.protocol.envelope import Kind
from unified.protocol.records import CallSpan
from unified.threads import CLOSE_WITHIN_S, TimerThread

VARIABLE = "UNIFIED_TRACE"
FILE_BYTES = 8 * 2**20
"""Size at which the file of spans is rotated."""
MAX_WAITING = 20_000
"""Most spans that wait to be written; beyond that the oldest are dropped."""
FLUSH_S = 0.25
MAX_TEXT = 200


class CallTracer:
    """Recorder of the spans of one endpoint, for a share of its calls (`rate`, from 0 to 1), in the file `path`.

    Beside it are the older half (``.1``) and the offset of the newer half (``.base``), as for a log.
    """

    def __init__(self, path: Path, rate: float = 1.0, exporters: Sequence[OtelExporter] = ()) -> None:
        self._exporters = exporters
        self._path = path
        self._older, self._base = (path.with_name(f"{path.name}.{suffix}") for suffix in ("1", "base"))
        for old in (path, self._older, self._base):  # left by a job with this id before a restart of the cluster
            old.unlink(missing_ok=True)
        self._limit = round(rate * 2**32)
        self._waiting: deque[CallSpan] = deque(maxlen=MAX_WAITING)
        self._start = self._size = 0
        self._timer = TimerThread("unified-trace", self._flush, stays=True)
        self.client = partial(TracedClient, self)
        """Factory of the endpoint's call client; `server` makes its call server."""
        self.server = partial(TracedServer, self)

    def samples(self, method: str, trace_id: str) -> bool:
        """Return True if a call is to have spans."""
        return crc32(trace_id.encode()) < self._limit and not is_runtimes(method)

    def add(self, span: CallSpan) -> None:
        """Keep a span, to be written soon; from any thread."""
        self._waiting.append(span)
        self._timer.set(time.monotonic() + FLUSH_S)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._timer.close(CLOSE_WITHIN_S)
        self._flush()
        for exporter in self._exporters:
            exporter.close()

    def _flush(self) -> None:
        spans = [self._waiting.popleft() for _ in range(len(self._waiting))]
        lines = b"".join(msgspec.json.encode(span) + b"\n" for span in spans)
        with contextlib.suppress(OSError):  # a full disk loses spans, and must not stop the worker
            if self._size and self._size + len(lines) > FILE_BYTES:
                self._path.replace(self._older)
                self._start, self._size = self._start + self._size, 0
                self._base.write_text(str(self._start))
            with self._path.open("ab", buffering=0) as file:
                self._size += file.write(lines)
        for exporter in self._exporters:
            exporter.export(spans)


def asked(env: Mapping[str, str], log_file: str) -> CallTracer | None:
    """Return the tracer that a worker's environment asks for, or None. OptionError: the value is not known."""
    word, _, rate_text = env.get(VARIABLE, "").partition(":")
    if not word or not log_file:
        return None
    with contextlib.suppress(ValueError):
        if word == "calls" and 0 <= (rate := float(rate_text or 1)) <= 1:
            return CallTracer(Path(f"{log_file.removesuffix('.err')}.trace.jsonl"), rate, exporters(env))
    raise OptionError(f"{VARIABLE}={env[VARIABLE]!r} is not known: calls, or calls:0.01 for one call in a hundred.")


class TracedClient(CallClient):
    """Call client whose calls have spans."""

    def __init__(self, tracer: CallTracer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer
        self._outbound = _OpenCalls(self)

    def made(self, call: OutboundCall) -> None:
        """Add a span when a call that was just made has ended."""
        future, at, began = call.future, time.time(), time.perf_counter()
        if future is None or not self._tracer.samples(call.method, call.trace_id):
            return
        call_id, token = f"{self._trace}{call.call_id}", f"{call.chain[-1]:08x}" if call.chain else ""

        def ended(future: Future[Any]) -> None:
            error = future.__dict__.get("_exception")  # `exception()` would mark the error as read
            text = "" if error is None else f"{getattr(error, 'type_name', type(error).__name__)}: {error}"[:MAX_TEXT]
            span = CallSpan("caller", at, time.perf_counter() - began, call.method, call.target, call_id, call.trace_id)
            self._tracer.add(msgspec.structs.replace(span, token=token, error=text))

        future.on_end(ended)


class _OpenCalls(dict[int, OutboundCall]):
    """Open calls of a client; tells the client of each new call."""

    def __init__(self, client: TracedClient) -> None:
        super().__init__()
        self._client = client

    def __setitem__(self, call_id: int, call: OutboundCall) -> None:
        super().__setitem__(call_id, call)
        self._client.made(call)


class TracedServer(CallServer):
    """Call server whose calls have spans."""

    def __init__(self, tracer: CallTracer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer
        self._times: dict[int, tuple[float, float, float]] = {}
        """Wall-clock arrival, and monotonic arrival and begin, of each open call, by `id`."""

    def accept(self, call: InboundCall) -> None:
        if self._tracer.samples(call.method, call.trace_id):
            self._times[id(call)] = (time.time(), time.perf_counter(), 0.0)
        super().accept(call)

    def _arguments(self, call: InboundCall) -> tuple[list[Any], dict[str, Any]]:
        if (times := self._times.get(id(call))) is not None:
            self._times[id(call)] = (*times[:2], time.perf_counter())
        return super()._arguments(call)

    def _answer(self, call: InboundCall, kind: Kind, answer: SerializedValue, may_wait: bool) -> None:
        if kind is Kind.ERROR and id(call) in self._times:
            self._ended(call, summary(answer.body)[:MAX_TEXT])
        super()._answer(call, kind, answer, may_wait)

    def _forget(self, call: InboundCall) -> None:
        self._ended(call, "the caller gave it up" if call.is_stale else "")
        super()._forget(call)

    def _ended(self, call: InboundCall, error: str) -> None:
        if (times := self._times.pop(id(call), None)) is not None:
            (at, came, began), now, call_id = times, time.perf_counter(), f"{call.sender[:8]}.{call.call_id}"
            span = CallSpan("callee", at, now - came, call.method, call.worker, call_id, call.trace_id)
            queued_s, token = (began or now) - came, f"{call.token:08x}"
            self._tracer.add(msgspec.structs.replace(span, token=token, queued_s=queued_s, error=error))
