"""Errors of calls that nobody reads are logged and counted, on every route."""

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World, pass_deadlines
from unified.api.runtime.batch import FutureSequence
from unified.bus.calls.future import gather
from unified.bus.endpoint import BusEndpoint
from unified.errors import RpcNotFoundError
from unified.testing import eventually


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "unified.bus"):
        yield caplog


def lines(log: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in log.records if f"event={event}" in record.getMessage()]


def broken() -> None:
    raise KeyError("weights")


def count_after_collecting(bus: BusEndpoint) -> int:
    gc.collect()  # a group call and its parts hold each other
    return bus.unread.total


def test_misspelt_call_whose_future_is_dropped_is_logged_once_and_counted(
    world: World, log: pytest.LogCaptureFixture
) -> None:
    a, _ = world.pair({"train": lambda: None})
    totals: list[int] = []
    a.unread.on_total = totals.append
    for _ in range(400):
        a.call("b", "trian", (), {})
    assert a.settle(DEADLINE_S, DEADLINE_S) == 400
    assert totals[-1] == 400
    (line,) = lines(log, "rpc-error-unread")
    assert "worker=a: the call of 'trian' to worker b failed, and nobody read its error" in line
    assert "RpcNotFoundError: worker b has no rpc method 'trian'. Did you mean 'train'?" in line
    (far,) = lines(log, "rpc-handler-failed")
    assert "worker=b method='trian' caller=a" in far


def test_traceback_of_the_handler_is_logged_at_both_ends(world: World, log: pytest.LogCaptureFixture) -> None:
    a, _ = world.pair({"broken": broken})
    for _ in range(3):
        a.call("b", "broken", (), {}).exception(DEADLINE_S)
    assert a.settle() == 0
    (far,) = lines(log, "rpc-handler-failed")  # rate-limited, and whoever reads the error or not
    assert 'raise KeyError("weights")' in far
    a.call("b", "broken", (), {})
    assert a.settle() == 1
    (line,) = lines(log, "rpc-error-unread")
    assert 'raise KeyError("weights")' in line


def test_whoever_reads_the_error_in_any_way_hears_no_more_of_it(world: World, log: pytest.LogCaptureFixture) -> None:
    a, _ = world.pair({"broken": broken, "slow": lambda: None})

    def call() -> Any:
        return a.call("b", "broken", (), {})

    async def await_it() -> None:
        with pytest.raises(KeyError):
            await call()

    with pytest.raises(KeyError):
        call().result(DEADLINE_S)
    assert isinstance(call().exception(DEADLINE_S), KeyError)
    asyncio.run(await_it())
    with pytest.raises(KeyError):
        gather([call(), call(), call()], "three").result(DEADLINE_S)
    with pytest.raises(KeyError):
        FutureSequence([call(), call()], [1, 1]).wait(DEADLINE_S)
    a.call("b", "slow", (), {}).cancel()
    assert a.settle() == 0
    assert not lines(log, "rpc-error-unread")


def test_a_group_call_that_nobody_reads_is_one_error(world: World) -> None:
    a, _ = world.pair({"broken": broken})
    whole = gather([a.call("b", "broken", (), {}) for _ in range(4)], "the call of 'broken' to group b")
    assert eventually(whole.done, DEADLINE_S)
    del whole
    assert eventually(lambda: count_after_collecting(a) == 1, DEADLINE_S)


def test_errors_that_are_still_held_are_told_when_the_worker_ends(world: World, log: pytest.LogCaptureFixture) -> None:
    a, _ = world.pair({"broken": broken})
    kept = [a.call("b", "broken", (), {}), a.call("b", "missing", (), {})]
    assert eventually(lambda: all(future.done() for future in kept), DEADLINE_S)
    assert a.unread.total == 0
    assert a.unread.tell_all() == 2
    assert a.unread.tell_all() == 2
    assert len(lines(log, "rpc-error-unread")) == 2
    with pytest.raises(RpcNotFoundError):  # it can be read all the same
        kept[1].result()


def test_what_breaks_off_because_all_are_stopped_is_no_news(world: World) -> None:
    may_end = threading.Event()
    a, _ = world.pair({"held": lambda: may_end.wait(DEADLINE_S)})
    kept = a.call("b", "held", (), {}, timeout=DEADLINE_S)
    a.unread.is_stopping = True
    pass_deadlines(a)
    assert eventually(kept.done, DEADLINE_S)
    assert a.unread.tell_all() == 0
    may_end.set()
