"""Streams, step by step: what each side does, and when."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Generator

import pytest

from tests.support.streams import Wire, count, count_async
from unified.bus.codec.codec import encode
from unified.bus.executor import HandlerPool
from unified.bus.streams import generator
from unified.bus.streams import stream as stream_module
from unified.bus.streams.generator import Step, is_stream
from unified.bus.streams.stream import WINDOW_ITEMS, RpcStream
from unified.errors import RemoteError, RpcError, RpcTimeoutError, UsageError, WorkerDiedError
from unified.protocol.envelope import Kind


def test_begins_with_stream_counts_its_items_and_ends_once() -> None:
    wire = Wire(count(3))
    assert [wire.source.advance() for _ in range(5)] == [Step.SENT, Step.SENT, Step.SENT, Step.ENDED, Step.ENDED]
    assert wire.sent == [(Kind.STREAM, 0), (Kind.ITEM, 0), (Kind.ITEM, 1), (Kind.ITEM, 2), (Kind.RESULT, 3)]
    assert list(RpcStream(wire.feed)) == [0, 1, 2]
    assert (wire.cancelled, wire.abandoned, wire.told) == (0, 0, [])


def test_empty_stream() -> None:
    wire = Wire(count(0))
    assert wire.advance() is Step.ENDED
    assert list(RpcStream(wire.feed)) == []


def test_parks_a_window_ahead_and_goes_on_when_half_of_it_was_consumed() -> None:
    seen: list[str] = []
    wire = Wire(count(100, seen))
    stream: RpcStream[int] = RpcStream(wire.feed)
    assert wire.advance() is Step.PARKED
    assert (wire.num_items, len(wire.source._sizes)) == (WINDOW_ITEMS, WINDOW_ITEMS)
    assert [next(stream) for _ in range(WINDOW_ITEMS // 2 - 1)] == list(range(WINDOW_ITEMS // 2 - 1))
    assert wire.source.advance() is Step.PARKED
    assert wire.told == []
    next(stream)
    assert wire.told == [WINDOW_ITEMS // 2]
    assert wire.advance() is Step.PARKED
    assert wire.num_items == WINDOW_ITEMS + WINDOW_ITEMS // 2
    assert seen == []


def test_bytes_on_their_way_are_bounded_whatever_an_item_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stream_module, generator):
        monkeypatch.setattr(module, "WINDOW_BYTES", 100_000)
    wire = Wire(b"x" * size for size in [60_000, 60_000, 500_000, 10, 10])
    stream: RpcStream[bytes] = RpcStream(wire.feed)
    assert wire.advance() is Step.PARKED
    assert wire.num_items == 2  # the second began below the limit
    assert len(next(stream)) == 60_000
    assert wire.told == [1]  # more than half of the bytes
    assert wire.advance() is Step.PARKED
    assert wire.num_items == 3
    sizes = []
    while wire.advance() is Step.PARKED:
        sizes.append(len(next(stream)))
    assert sizes + [len(each) for each in stream] == [60_000, 500_000, 10, 10]


def test_error_comes_after_the_items_before_it_and_is_the_remote_one() -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise KeyError("key")

    wire = Wire(broken())
    wire.advance()
    stream: RpcStream[int] = RpcStream(wire.feed)
    assert next(stream) == 1
    with pytest.raises(KeyError) as caught:
        next(stream)
    assert isinstance(caught.value, RemoteError)
    assert 'raise KeyError("key")' in caught.value.traceback
    assert "stream_source.py" not in caught.value.traceback
    with pytest.raises(StopIteration):
        next(stream)
    assert (wire.sent[-1], wire.cancelled) == ((Kind.ERROR, 1), 0)


def test_value_that_cannot_be_sent_ends_the_stream_and_closes_the_generator() -> None:
    seen: list[str] = []

    def values() -> Generator[object, None, None]:
        yield 1
        try:
            yield threading.Lock()
        finally:
            seen.append("finally")

    wire = Wire(values())
    assert wire.advance() is Step.ENDED
    stream: RpcStream[object] = RpcStream(wire.feed)
    assert next(stream) == 1
    with pytest.raises(RemoteError, match="cannot be sent"):
        next(stream)
    assert seen == ["finally"]


def test_close_stops_the_generator_and_ends_the_iteration() -> None:
    seen: list[str] = []
    wire = Wire(count(100, seen))
    with RpcStream[int](wire.feed) as stream:
        wire.advance()
        assert next(stream) == 0
    stream.close()
    assert wire.cancelled == 1
    assert list(stream) == []  # what had come already is dropped
    assert wire.advance() is Step.ENDED
    assert seen == ["exit", "finally"]
    assert wire.sent[-1][0] is Kind.ITEM  # nobody waits for an end


def test_close_after_the_end_tells_nobody() -> None:
    wire = Wire(count(2))
    wire.advance()
    RpcStream(wire.feed).close()
    assert (wire.cancelled, wire.abandoned) == (0, 0)


def test_generator_that_has_not_begun_is_closed_without_running() -> None:
    seen: list[str] = []
    wire = Wire(count(3, seen))
    wire.source.close()
    assert wire.advance() is Step.ENDED
    assert seen == []


def test_handle_that_is_dropped_stops_the_generator() -> None:
    seen: list[str] = []
    wire = Wire(count(100, seen))
    stream: RpcStream[int] | None = RpcStream(wire.feed)
    wire.advance()
    assert stream is not None
    next(stream)
    assert wire.abandoned == 0
    del stream
    gc.collect()
    assert wire.abandoned == 1
    wire.advance()
    assert seen == ["exit", "finally"]


def test_error_that_was_raised_keeps_nothing_alive() -> None:
    wire = Wire(count(0))

    def fail() -> weakref.ref[WorkerDiedError]:
        error = WorkerDiedError("gone")
        wire.feed.fail(error)
        return weakref.ref(error)

    def read() -> None:
        stream: RpcStream[int] = RpcStream(wire.feed)
        with contextlib.suppress(WorkerDiedError):
            next(stream)

    error = fail()
    gc.collect()
    gc.disable()
    try:
        assert error() is not None
        read()
        assert error() is None
    finally:
        gc.enable()


def test_death_comes_after_what_had_come() -> None:
    wire = Wire(count(100))
    wire.advance()
    wire.feed.fail(WorkerDiedError("worker b died"))
    wire.feed.fail(RpcTimeoutError("later"))
    stream: RpcStream[int] = RpcStream(wire.feed)
    assert [next(stream) for _ in range(WINDOW_ITEMS)] == list(range(WINDOW_ITEMS))
    with pytest.raises(WorkerDiedError):
        next(stream)


def test_deadline_stops_the_generator_and_sends_nothing() -> None:
    seen: list[str] = []
    wire = Wire(count(100, seen), expires=time.monotonic())
    assert wire.advance() is Step.ENDED
    assert wire.num_items == 0
    waiting = Wire(count(100, seen), expires=time.monotonic() + 0.05)
    waiting.source.run(HandlerPool("bus-test", 1))  # returns: the deadline ends the waiting
    assert waiting.num_items == WINDOW_ITEMS
    assert seen == ["exit", "finally"]


@pytest.mark.parametrize(
    ("index", "at_the_end"), [(5, False), (2, False), (5, True)], ids=["gap", "the next", "gap at the end"]
)
def test_lost_item_is_an_error(index: int, at_the_end: bool) -> None:
    wire = Wire(count(0))
    for i in range(2):
        wire.feed.push(i, encode(i).body, [])
    if at_the_end:
        wire.feed.end(index)
    else:
        wire.feed.push(index, encode(index).body, [])
        wire.feed.end(3)
    stream: RpcStream[int] = RpcStream(wire.feed)
    if index == 2:
        assert list(stream) == [0, 1, 2]
        return
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(RpcError, match=r"item 2 of the call of 'tokens' to worker b was lost"):
        next(stream)
    assert wire.cancelled == (not at_the_end)


def test_item_that_comes_twice_is_taken_once() -> None:
    wire = Wire(count(0))
    for i in (0, 1, 0, 1, 2):
        wire.feed.push(i, encode(i).body, [])
    wire.feed.end(3)
    assert list(RpcStream[int](wire.feed)) == [0, 1, 2]


def test_item_that_cannot_be_read_ends_the_stream() -> None:
    wire = Wire(count(100))
    wire.feed.push(0, b"\xc1", [])
    stream: RpcStream[int] = RpcStream(wire.feed)
    with pytest.raises(RpcError, match=r"an item of the call of 'tokens' to worker b cannot be read here"):
        next(stream)
    assert wire.cancelled == 1
    assert list(stream) == []


def test_more_than_was_sent_or_less_than_before_changes_nothing() -> None:
    wire = Wire(count(100))
    wire.advance()
    wire.source.more(-3)
    assert len(wire.source._sizes) == WINDOW_ITEMS
    wire.source.more(10)
    wire.source.more(5)
    assert len(wire.source._sizes) == WINDOW_ITEMS - 10
    wire.source.more(10**9)
    assert len(wire.source._sizes) == 0


def test_peer_that_is_gone_closes_the_generator() -> None:
    seen: list[str] = []
    wire = Wire(count(100, seen))
    wire.source.advance()
    wire.is_cut = True
    assert wire.advance() is Step.ENDED
    assert seen == ["exit", "finally"]


def test_generator_that_refuses_to_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def stubborn() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            raise ValueError("in finally")

    wire = Wire(stubborn())
    wire.source.advance()
    wire.source.close()
    assert wire.source.advance() is Step.ENDED
    assert "event=stream-not-closed" in caplog.text
    assert "in finally" in caplog.text


def test_stream_cannot_be_sent_on() -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        encode([RpcStream(Wire(count(1)).feed)])


def test_what_is_a_stream() -> None:
    assert is_stream(count(1))
    assert is_stream(count_async(1))
    assert not any(is_stream(each) for each in ([1], iter([1]), map(str, [1]), "text", None, count))
