"""Export of the spans of calls to OpenTelemetry, by its standard variables such as ``OTEL_EXPORTER_OTLP_ENDPOINT``.

Needs the extra ``otel``. Span ids follow from call ids: both sides of a call are in one trace, though each worker
exports by itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from unified.protocol.records import CallSpan
from unified.threads import start_thread

logger = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CLOSE_WITHIN_S = 2.0


class OtelExporter:
    """Gives spans to OpenTelemetry's own batches. ImportError: the extra is not installed."""

    def __init__(self, env: Mapping[str, str]) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._trace: Any = trace
        self._make: Any = ReadableSpan
        self._batches = BatchSpanProcessor(OTLPSpanExporter())
        worker = {"service.instance.id": env.get("NAME", ""), "unified.job": env.get("UNIFIED_JOB_ID", "")}
        worker |= {"host.name": env["UNIFIED_NODE"]} if "UNIFIED_NODE" in env else {}
        named = {} if "OTEL_SERVICE_NAME" in env else {"service.name": env.get("ROLE", "unified")}
        self._resource = Resource.create({**worker, **named})

    def export(self, spans: Sequence[CallSpan]) -> None:
        """Queue spans; a queue that is full drops them."""
        for span in spans:
            self._batches.on_end(self._readable(span))

    def close(self) -> None:
        """Send what is queued, for at most two seconds."""
        with contextlib.suppress(RuntimeError):  # no thread is left
            start_thread("otel-flush", self._batches.force_flush).join(CLOSE_WITHIN_S)  # ignores its own timeout

    def _readable(self, span: CallSpan) -> Any:
        is_caller = span.kind == "caller"
        caller, handled = f"caller {span.call}", f"callee {span.trace} {span.token}"
        own, parent = (caller, handled if span.token else "") if is_caller else (handled, caller)
        trace = self._trace
        status = trace.Status(trace.StatusCode.ERROR, span.error) if span.error else trace.Status()
        return self._make(
            name=span.method,
            context=self._context(span.trace, own),
            parent=self._context(span.trace, parent) if parent else None,
            resource=self._resource,
            attributes={
                "rpc.system": "unified",
                "rpc.method": span.method,
                "server.address" if is_caller else "client.address": span.peer,
            },
            kind=trace.SpanKind.CLIENT if is_caller else trace.SpanKind.SERVER,
            status=status,
            start_time=(began := int(span.at * 1e9)),
            end_time=began + int(span.seconds * 1e9),
        )

    def _context(self, trace_id: str, span_id: str) -> Any:
        numbers = [_number(trace_id, 16), _number(span_id, 8)]
        return self._trace.SpanContext(*numbers, is_remote=False, trace_flags=self._trace.TraceFlags(1))


def exporters(env: Mapping[str, str]) -> list[OtelExporter]:
    if not any(env.get(name) for name in ENDPOINTS):
        return []
    try:
        return [OtelExporter(env)]
    except ImportError as error:
        logger.warning("event=otel-missing %s: spans are not exported: pip install 'unified-runtime[otel]'", error)
        return []


def _number(text: str, num_bytes: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=num_bytes).digest(), "big")
