"""Calls that arrive out of order: they start in the order in which they were made, or their caller is told."""

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.bus import DEADLINE_S, World, entry
from unified.bus.calls.dispatcher import SeenCalls
from unified.errors import RouteLostError
from unified.protocol.records import Reachability
from unified.testing import eventually


def test_caller_of_a_call_that_came_too_late_to_be_believed_is_told(world: World) -> None:
    ran: list[int] = []
    a, b = world.pair({"note": ran.append})
    a._sender._positions = itertools.count(10 * SeenCalls.KEPT)
    a.call("b", "note", (1,), {}).result(DEADLINE_S)
    a._sender._positions = itertools.count(1)
    with pytest.raises(RouteLostError, match="the call of 'note' reached worker b behind so many later ones"):
        a.call("b", "note", (2,), {}).result(DEADLINE_S)
    assert ran == [1]
    assert eventually(lambda: b.num_rejected == 1)


def test_call_whose_argument_takes_long_to_be_copied_is_not_too_old(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeenCalls, "KEPT", 2 * SeenCalls._BITS)
    is_copying, release = threading.Event(), threading.Event()
    a, _ = world.pair({"size": lambda value: len(value)})
    share = a._sender._share

    def share_slowly(connection: Any, payload: Any) -> Any:
        if payload.content.buffers:
            is_copying.set()
            assert release.wait(DEADLINE_S)
        return share(connection, payload)

    a._sender._share = share_slowly  # type: ignore[method-assign]
    sizes: list[int] = []
    large = threading.Thread(
        target=lambda: sizes.append(a.call("b", "size", (np.ones(100_000),), {}).result(DEADLINE_S))
    )
    large.start()
    assert is_copying.wait(DEADLINE_S)
    small = [a.call("b", "size", ("",), {}) for _ in range(4 * SeenCalls._BITS)]
    assert small[-1].result(DEADLINE_S) == 0
    release.set()
    large.join(DEADLINE_S)
    assert sizes == [100_000]
    assert all(each.result(DEADLINE_S) == 0 for each in small)


def test_calls_that_waited_for_their_worker_go_before_those_that_are_made_while_they_go(world: World) -> None:
    started: list[int] = []

    async def note(i: int) -> None:
        started.append(i)

    a, _ = world.endpoint("a")
    futures = [a.call("b", "note", (i,), {}) for i in range(50)]
    _, inbox = world.endpoint("b", {"note": note})
    is_sending, release = threading.Event(), threading.Event()
    send = a._sender.call

    def send_slowly(*args: Any) -> None:
        if not is_sending.is_set():
            is_sending.set()
            assert release.wait(DEADLINE_S)
        send(*args)

    a._sender.call = send_slowly  # type: ignore[method-assign, assignment]
    news = threading.Thread(target=a.update_directory, args=([entry("b", inbox)],))
    news.start()
    assert is_sending.wait(DEADLINE_S)
    futures += [a.call("b", "note", (i,), {}) for i in range(50, 60)]
    release.set()
    for each in futures:
        each.result(DEADLINE_S)
    news.join(DEADLINE_S)
    assert started == list(range(60))


def test_calls_of_an_incarnation_that_is_over_are_not_run(world: World) -> None:
    ran: list[int] = []
    a, b = world.cast({"a": {}, "b": {"note": ran.append}}).values()
    a.call("b", "note", (1,), {}).result(DEADLINE_S)
    b.update_directory([entry("a", None, 0, Reachability.DEAD, "killed by SIGKILL")])
    a.call("b", "note", (2,), {})
    assert eventually(lambda: b.num_rejected == 1)
    assert ran == [1]
