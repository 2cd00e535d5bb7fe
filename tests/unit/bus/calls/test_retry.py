"""Which failures are worth another attempt, how many there are, and what ends them."""

import concurrent.futures
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.deadlines import met
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import rpc
from unified.bus.calls.remote_errors import describe, rebuild
from unified.bus.calls.retry import BACKOFF, RetryPolicy, check_retries, with_retries
from unified.core.backoff import Backoff
from unified.errors import (
    BusOverloadedError,
    RemoteError,
    RouteLostError,
    RpcCancelledError,
    RpcError,
    RpcNotFoundError,
    RpcTimeoutError,
    UsageError,
    WorkerDiedError,
)
from unified.testing import eventually

DEADLINE_S = met(100.0)
QUICK = Backoff(first_s=0.001, limit_s=0.002, num_free=1)


class Target:
    """A worker that answers each attempt as its script says; after the script, never."""

    def __init__(self, *script: Exception | int, deadline: float | None = None) -> None:
        self.script = list(script)
        self.deadline = deadline
        self.timeouts: list[float | None] = []
        self.attempts: list[RpcFuture[int]] = []

    def call(self, timeout: float | None = None) -> RpcFuture[int]:
        self.timeouts.append(timeout)
        future: RpcFuture[int] = RpcFuture("the call of 'm' to worker b", deadline=self.deadline)
        self.attempts.append(future)
        if self.script:
            step = self.script.pop(0)
            if isinstance(step, UsageError | BusOverloadedError) and len(self.attempts) > 1:
                raise step  # as the bus does before anything was sent
            if isinstance(step, Exception):
                future.fail(step)
            else:
                future.succeed(step)
        return future

    def retried(self, retries: int, backoff: Backoff = QUICK) -> RpcFuture[int]:
        return with_retries(self.call(), self.call, RetryPolicy(retries=retries, backoff=backoff))


def remote(error: Exception) -> RpcError:
    return rebuild(describe(error, worker="b", node="n1", ours={}), "the call")


@pytest.mark.parametrize(
    "error",
    [WorkerDiedError("died"), RouteLostError("broke"), BusOverloadedError("full")],
    ids=lambda e: type(e).__name__,
)
def test_worth_another_attempt(error: Exception) -> None:
    target = Target(error, error, 7)
    assert target.retried(2).result(DEADLINE_S) == 7
    assert len(target.attempts) == 3


@pytest.mark.parametrize(
    "error",
    [
        WorkerDiedError("for good", is_final=True),
        remote(KeyError("k")),
        remote(WorkerDiedError("another one, called by the handler")),
        RpcTimeoutError("late"),
        RpcCancelledError("cancelled"),
        RpcNotFoundError("no such"),
        RpcError("no route"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_not_worth_another_attempt(error: Exception) -> None:
    target = Target(error, 7)
    with pytest.raises(type(error)) as caught:
        target.retried(5).result(DEADLINE_S)
    assert caught.value is error
    assert len(target.attempts) == 1
    assert not any("attempt" in note for note in getattr(error, "__notes__", ()))


def test_no_failure_no_retry() -> None:
    target = Target(7)
    assert target.retried(5).result(0) == 7
    assert len(target.attempts) == 1


def test_last_error_says_how_often_it_was_tried() -> None:
    target = Target(*[WorkerDiedError(f"death {i}") for i in range(9)])
    with pytest.raises(WorkerDiedError, match="death 2") as caught:
        target.retried(2).result(DEADLINE_S)
    assert caught.value.__notes__ == ["That was attempt 3 of at most 3."]


@given(st.integers(0, 5), st.integers(0, 8))
def test_number_of_attempts(retries: int, deaths: int) -> None:
    target = Target(*[WorkerDiedError("died")] * deaths, 7)
    future = target.retried(retries)
    if deaths <= retries:
        assert future.result(DEADLINE_S) == 7
    else:
        with pytest.raises(WorkerDiedError):
            future.result(DEADLINE_S)
    assert len(target.attempts) == min(deaths, retries) + 1


def test_wait_between_attempts_grows_except_for_a_death() -> None:
    policy = RetryPolicy(retries=20)
    delays = [policy.delay_s(i, BusOverloadedError("full")) for i in range(1, 11)]
    assert (delays[:4], delays[-1]) == ([BACKOFF.first_s * 2**i for i in range(4)], BACKOFF.limit_s)
    assert [policy.delay_s(i, WorkerDiedError("died")) for i in (1, 20, 21)] == [0, 0, None]


def test_what_the_bus_says_at_once_counts_as_an_attempt() -> None:
    assert Target(WorkerDiedError("died"), BusOverloadedError("full"), 7).retried(2).result(DEADLINE_S) == 7
    broken = Target(WorkerDiedError("died"), UsageError("cannot be sent"), 7)
    with pytest.raises(UsageError, match="cannot be sent"):
        broken.retried(2).result(DEADLINE_S)


def test_deadline_is_one_for_all_attempts() -> None:
    target = Target(WorkerDiedError("died"), WorkerDiedError("died"), deadline=time.monotonic() + DEADLINE_S)
    future = target.retried(5)
    eventually(lambda: len(target.attempts) == 3)
    assert future.deadline == target.deadline
    first, second, third = target.timeouts
    assert first is None
    assert second is not None
    assert third is not None
    assert DEADLINE_S > second >= third > 0
    future.cancel()


def test_no_attempt_that_would_begin_after_the_deadline() -> None:
    target = Target(BusOverloadedError("full"), 7, deadline=time.monotonic() + 1)
    with pytest.raises(BusOverloadedError):
        target.retried(5, Backoff(first_s=60)).result(DEADLINE_S)
    assert len(target.attempts) == 1


def test_cancelling_cancels_the_attempt_that_runs() -> None:
    target = Target(WorkerDiedError("died"))
    future = target.retried(5)
    eventually(lambda: len(target.attempts) == 2)
    assert future.cancel()
    assert target.attempts[1].cancelled()
    with pytest.raises(RpcCancelledError):
        future.result(0)


def test_cancelling_between_attempts_makes_no_other() -> None:
    target = Target(BusOverloadedError("full"), 7)
    future = target.retried(5, Backoff(first_s=0.05))
    assert future.cancel()
    with pytest.raises(RpcCancelledError):
        future.result(0)
    eventually(lambda: not running("bus-retry"))
    assert len(target.attempts) == 1


def test_is_a_future_like_any_other() -> None:
    late = Target()
    futures = [Target(WorkerDiedError("died"), 7).retried(1), late.retried(1)]
    called: list[int] = []
    futures[0].add_done_callback(lambda each: called.append(each.result()))
    done = concurrent.futures.wait(futures, DEADLINE_S, concurrent.futures.FIRST_COMPLETED).done
    assert done == {futures[0]}
    eventually(lambda: called == [7])
    late.attempts[0].succeed(8)
    assert futures[1].result(DEADLINE_S) == 8


async def test_await() -> None:
    assert await Target(WorkerDiedError("died"), 7).retried(1) == 7
    with pytest.raises(WorkerDiedError):
        await Target(*[WorkerDiedError("died")] * 2).retried(1)


@rpc(idempotent=True)
def safe() -> None: ...


@rpc("renamed")
def unsafe() -> None: ...


def stub() -> None: ...


@pytest.mark.parametrize("method", [safe, "safe", stub, "elsewhere"])
def test_may_be_retried(method: str | Callable[[], None]) -> None:
    check_retries(method, 2, {"safe": safe, "renamed": unsafe})


@pytest.mark.parametrize("method", [unsafe, "renamed"])
def test_method_that_is_known_not_to_be_idempotent(method: str | Callable[[], None]) -> None:
    check_retries(method, 0, {"renamed": unsafe})
    with pytest.raises(UsageError, match=r"retries=2 was asked for 'renamed', which is not marked @rpc\(idempotent="):
        check_retries(method, 2, {"renamed": unsafe})


@pytest.mark.parametrize("retries", [-1, 1.5, "2", True])
def test_retries_is_a_number(retries: int) -> None:
    with pytest.raises(UsageError, match="must be a whole number, 0 or more"):
        check_retries(safe, retries)


def running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_remote_error_of_a_retried_call_is_as_ever() -> None:
    with pytest.raises(KeyError) as caught:
        Target(WorkerDiedError("died"), remote(KeyError("k"))).retried(3).result(DEADLINE_S)
    assert isinstance(caught.value, RemoteError)
    assert caught.value.__notes__[-1] == "That was attempt 2 of at most 4."
