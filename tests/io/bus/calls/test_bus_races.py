"""What happens between two steps of another thread: each test lets it happen just there."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.bus import DEADLINE_S, World, entry
from tests.support.deadlines import missed
from unified.bus.calls import client
from unified.bus.calls.sender import OutgoingPayload
from unified.bus.streams.stream import StreamFeed
from unified.errors import RpcCancelledError, RpcTimeoutError, WorkerDiedError
from unified.protocol.records import Reachability
from unified.testing import eventually


def test_stream_whose_call_is_cancelled_while_it_is_opened_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> Iterator[int]:
        yield from range(1000)

    a, b = world.pair({"count": count})

    def make_feed(*args: Any, **options: Any) -> StreamFeed:
        (call_id,) = a._client._outbound
        a._client._cancel(call_id)
        return StreamFeed(*args, **options)

    monkeypatch.setattr(client, "StreamFeed", make_feed)
    with pytest.raises(RpcCancelledError):
        a.call("b", "count", (), {}).result(DEADLINE_S / 2)
    assert eventually(lambda: not b._server._known)
    assert all(link._num_wanting == 0 for link in a._io.connections)


def test_memory_that_is_granted_to_the_dead_is_free_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.route != "auto":
        pytest.skip("only Unix sockets go together with shared memory")
    a, b = world.pair({"size": len})
    data = np.zeros(2**20, "u1")
    assert a.call("b", "size", (data,), {}).result(DEADLINE_S) == 2**20
    grant = OutgoingPayload.grant

    def die_and_grant(self: OutgoingPayload, *args: Any) -> Any:
        monkeypatch.setattr(OutgoingPayload, "grant", grant)
        (link,) = a._io.connections
        b.close()
        assert eventually(lambda: link.is_lost)
        dead = entry("b", b._listeners.inbox, state=Reachability.DEAD, reason="it was killed")
        a.update_directory([dead])
        return grant(self, *args)

    monkeypatch.setattr(OutgoingPayload, "grant", die_and_grant)
    with pytest.raises(WorkerDiedError):
        a.call("b", "size", (data,), {}).result(DEADLINE_S)
    gc.collect()
    # What is idle is given back after less than 60 s.
    assert eventually(lambda: not a._memory.trim(time.monotonic() + 60) and a._memory._table.total_bytes == 0)


def test_deadlines_pass_after_something_failed_on_the_thread_that_ticks(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    a, _ = world.pair({"wait": lambda: release.wait(DEADLINE_S)})
    failed = threading.Event()

    def fail() -> bool:
        failed.set()
        raise SystemExit("no thread to be had")

    monkeypatch.setattr(a._io, "tick", fail)
    a._io.tick_soon()
    assert failed.wait(DEADLINE_S)
    with pytest.raises(RpcTimeoutError):
        a.call("b", "wait", (), {}, timeout=missed(0.1)).result(DEADLINE_S)
    assert "event=timer-failed" in caplog.text
    release.set()


def test_a_death_is_told_however_long_it_takes_to_give_memory_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To unmap what a dead worker had shared took up to 1.8 s in the soak."""
    is_unmapped, is_told = threading.Event(), threading.Event()
    a, b = world.pair({"wait": lambda: is_unmapped.wait(DEADLINE_S)})
    unmapped: list[str] = []

    def forget(inbox_id: str) -> None:
        is_unmapped.wait(DEADLINE_S)
        unmapped.append(inbox_id)

    monkeypatch.setattr(a._reader, "forget", forget)
    future = a.call("b", "wait", (), {})
    future.add_done_callback(lambda _: is_told.set())
    try:
        a.update_directory([entry("b", b._listeners.inbox, state=Reachability.DEAD, reason="it was killed")])
        assert is_told.wait(DEADLINE_S)
        assert isinstance(future.exception(), WorkerDiedError)
        assert not unmapped
    finally:
        is_unmapped.set()
    assert eventually(lambda: unmapped == [b.inbox_id])
