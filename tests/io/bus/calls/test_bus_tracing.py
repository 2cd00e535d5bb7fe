"""Spans of both sides of calls, on every route, and what is kept of them."""

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.bus import World, call, entry
from unified.bus import otel, tracing
from unified.bus.endpoint import BusEndpoint
from unified.bus.otel import exporters
from unified.bus.tracing import CallTracer
from unified.errors import OptionError, RemoteError
from unified.protocol.records import CallSpan
from unified.testing import eventually


def spans(path: Path) -> list[CallSpan]:
    return [msgspec.json.decode(line, type=CallSpan) for line in path.read_bytes().splitlines()]


def fail() -> None:
    raise KeyError("gone")


def traced_pair(world: World, folder: Path, methods: dict[str, Callable[..., Any]], rate: float = 1.0) -> BusEndpoint:
    """`a`, which knows `b`, which has the methods and knows itself; each with a tracer."""
    a, _ = world.endpoint("a", tracer=CallTracer(folder / "a", rate))
    b, inbox = world.endpoint("b", methods, tracer=CallTracer(folder / "b", rate))
    world._await_relay()
    a.update_directory([entry("b", inbox)])
    b.update_directory([entry("b", inbox)])
    return a


def test_both_sides_of_a_call_have_a_span_and_a_chain_is_one_trace(world: World, tmp_path: Path) -> None:
    made: list[BusEndpoint] = []

    async def outer(number: int) -> int:
        found: int = await made[0].call("b", "inner", [number], {})
        return found

    methods: dict[str, Callable[..., Any]] = {"outer": outer, "inner": lambda number: number + 1, "fail": fail}
    a = traced_pair(world, tmp_path, methods)
    made.append(world.endpoints[1])
    assert call(a, "outer", 3) == 4
    with pytest.raises(RemoteError, match="gone"):
        call(a, "fail")
    for endpoint in world.endpoints:
        endpoint.close()
    of_a, of_b = spans(tmp_path / "a"), spans(tmp_path / "b")
    assert [(span.kind, span.method, span.peer) for span in of_a] == [("caller", "outer", "b"), ("caller", "fail", "b")]
    found = {(span.kind, span.method): span for span in of_b}
    assert len(found) == len(of_b) == 4
    outer_there, inner_there = found["callee", "outer"], found["callee", "inner"]
    assert (outer_there.call, outer_there.trace, outer_there.peer) == (of_a[0].call, of_a[0].trace, "a")
    inner_here = found["caller", "inner"]
    assert inner_here.token == outer_there.token != inner_there.token
    assert (inner_here.trace, inner_there.trace, inner_there.call) == (of_a[0].trace, of_a[0].trace, inner_here.call)
    assert of_a[0].seconds >= outer_there.seconds >= inner_here.seconds >= inner_there.seconds >= 0
    assert of_a[1].error == found["callee", "fail"].error == "KeyError: 'gone'"
    assert all(0 <= span.queued_s <= span.seconds for span in of_b)
    assert of_a[1].at >= of_a[0].at + of_a[0].seconds - 0.05


def test_of_sampled_calls_both_sides_are_kept(world: World, tmp_path: Path) -> None:
    a = traced_pair(world, tmp_path, {"inner": lambda: None}, rate=0.2)
    for _ in range(400):
        call(a, "inner")
    for endpoint in world.endpoints:
        endpoint.close()
    here, there = ({span.call for span in spans(tmp_path / name)} for name in "ab")
    assert here == there
    assert 20 < len(here) < 200


def test_the_error_of_a_traced_call_that_nobody_reads_is_still_told(world: World, tmp_path: Path) -> None:
    a = traced_pair(world, tmp_path, {"fail": fail})
    future = a.call("b", "fail", [], {})
    eventually(lambda: future.done(), timeout=100)
    assert a.unread.tell_all() == 1


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FILE_BYTES", 2000)
    tracer = CallTracer(tmp_path / "0.trace.jsonl")
    for number in range(200):
        tracer.add(span(str(number)))
        tracer._flush()
    tracer.close()
    newest, older = tmp_path / "0.trace.jsonl", tmp_path / "0.trace.jsonl.1"
    kept = [int(each.call) for file in (older, newest) for each in spans(file)]
    assert kept == list(range(kept[0], 200))
    assert max(newest.stat().st_size, older.stat().st_size) <= 2000
    base = int((tmp_path / "0.trace.jsonl.base").read_text())
    assert base == sum(len(msgspec.json.encode(span(str(number)))) + 1 for number in range(200)) - newest.stat().st_size


def test_spans_that_two_threads_add_at_once_are_written(tmp_path: Path) -> None:
    tracer = CallTracer(tmp_path / "0.trace.jsonl")
    tracer._waiting.append(span("1"))  # the other thread has come so far
    tracer.add(span("2"))
    eventually(lambda: (tmp_path / "0.trace.jsonl").exists() and len(spans(tmp_path / "0.trace.jsonl")) == 2)
    tracer.close()


def span(call_id: str, **more: Any) -> CallSpan:
    fields: dict[str, Any] = {"kind": "caller", "at": 1.7e9, "seconds": 0.25, "method": "score", "peer": "b"}
    return CallSpan(**(fields | {"call": call_id, "trace": call_id} | more))


@pytest.mark.parametrize("word", ["all", "calls:2", "calls:-1", "calls:x", "calls:nan"])
def test_what_is_asked_for_in_other_words_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="UNIFIED_TRACE="):
        tracing.asked({"UNIFIED_TRACE": word}, str(tmp_path / "0.err"))
    assert tracing.asked({}, str(tmp_path / "0.err")) is None


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what OTLP exporters post."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Bodies that came to an HTTP server on this host, to which the standard variable points."""
    Collector.bodies = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Collector.bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_go_to_a_collector_of_open_telemetry(collector: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call and the call that its handler makes are one trace there, each span below that which led to it."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("ROLE", "trainer")
    (exporter,) = exporters({"OTEL_EXPORTER_OTLP_ENDPOINT": "set", "ROLE": "trainer", "NAME": "trainer_1-0_1-0"})
    led = {"trace": "x.1"}
    exporter.export([span("x.1", **led), span("x.1", kind="callee", token="0a", **led)])
    exporter.export(
        [span("y.7", token="0a", **led), span("y.7", kind="callee", token="0b", error="KeyError: k", **led)]
    )
    exporter.close()
    (resource,) = [each for body in collector for each in ExportTraceServiceRequest.FromString(body).resource_spans]
    named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ("trainer", "trainer_1-0_1-0")
    first, handled, second, last = resource.scope_spans[0].spans
    assert len({each.trace_id for each in (first, handled, second, last)}) == 1
    assert (first.parent_span_id, handled.parent_span_id) == (b"", first.span_id)
    assert (second.parent_span_id, last.parent_span_id) == (handled.span_id, second.span_id)
    assert (last.status.message, last.end_time_unix_nano - last.start_time_unix_nano) == ("KeyError: k", 250_000_000)


@pytest.mark.usefixtures("collector")
def test_a_collector_that_does_not_answer_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(Collector, "do_POST", lambda _: may_answer.wait(100))
    monkeypatch.setattr(otel, "CLOSE_WITHIN_S", 0.1)
    (exporter,) = exporters({"OTEL_EXPORTER_OTLP_ENDPOINT": "set"})
    exporter.export([span(str(number)) for number in range(1500)])
    exporter.close()
    (left,) = (thread for thread in threading.enumerate() if thread.name == "otel-flush")
    assert left.daemon, "nor does it hold the end of the process"
    may_answer.set()
    monkeypatch.undo()  # it answers now, and takes the rest
    left.join(100)


def test_without_the_variable_nothing_is_exported() -> None:
    assert exporters({}) == []
