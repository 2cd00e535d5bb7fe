"""Retries between real workers, on every route."""

import signal
import threading
from typing import Any

import pytest

from tests.support.bus import DEADLINE_S, World, entry, pass_deadlines
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.retry import RetryPolicy, with_retries
from unified.bus.endpoint import BusEndpoint
from unified.errors import BusOverloadedError, RpcTimeoutError, WorkerDiedError
from unified.protocol.records import Reachability
from unified.testing import eventually


def retried(
    bus: BusEndpoint, method: str, *args: Any, retries: int = 3, timeout: float | None = None
) -> RpcFuture[Any]:
    def again(left_s: float | None) -> RpcFuture[Any]:
        return bus.call("b", method, args, {}, timeout=left_s, block=False)

    return with_retries(bus.call("b", method, args, {}, timeout=timeout), again, RetryPolicy(retries=retries))


def test_next_incarnation_answers_when_the_first_died_with_the_call(world: World) -> None:
    a, first = world.pair_with_process()
    assert retried(a, "pid").result(DEADLINE_S) == first.popen.pid
    first.kill(signal.SIGSTOP)
    future = retried(a, "pid")
    first.kill()
    a.update_directory([entry("b", None, 0, Reachability.DEAD, "killed by SIGKILL")])
    second = world.process("b", 1)
    a.update_directory([entry("b", second.inbox, 1)])
    assert future.result(DEADLINE_S) == second.popen.pid


def test_worker_that_ended_for_good_is_not_called_again(world: World) -> None:
    a, _ = world.pair({})
    a.update_directory([entry("b", None, 0, Reachability.ENDED, "it is not to be called.")])
    with pytest.raises(WorkerDiedError, match=r"has ended for good.* called\. `unified explain b` says more") as caught:
        retried(a, "ping").result(DEADLINE_S)
    assert caught.value.is_final
    assert not getattr(caught.value, "__notes__", None)


def test_deadline_ends_the_wait_for_a_next_incarnation_that_does_not_come(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda: release.wait(DEADLINE_S)})
    future = retried(a, "hold", timeout=DEADLINE_S)
    first = future.parts[0]
    a.update_directory([entry("b", None, 0, Reachability.DEAD, "killed")])
    eventually(lambda: future.parts[0] is not first)
    pass_deadlines(a)
    with pytest.raises(RpcTimeoutError, match="worker b did not answer 'hold'") as caught:
        future.result(DEADLINE_S)
    assert caught.value.__notes__ == ["That was attempt 2 of at most 4."]
    release.set()


def test_cancelling_reaches_the_attempt_that_runs(world: World) -> None:
    a, _ = world.endpoint("a")
    future = retried(a, "ping")
    assert future.cancel()
    assert not a._client._outbound


def test_full_window_is_tried_again(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda data: release.wait(DEADLINE_S), "ping": lambda data: "pong"}, limit_bytes=100_000)
    filling = a.call("b", "hold", (b"x" * 80_000,), {})

    def again(left_s: float | None) -> RpcFuture[Any]:
        try:
            return a.call("b", "ping", (b"x" * 80_000,), {}, timeout=left_s, block=False)
        except BusOverloadedError:
            release.set()  # there will be room at the next attempt, or the one after
            raise

    failed: RpcFuture[Any] = RpcFuture("the first attempt")
    failed.fail(BusOverloadedError("full"))
    assert with_retries(failed, again, RetryPolicy(retries=8)).result(DEADLINE_S) == "pong"
    assert filling.result(DEADLINE_S)
