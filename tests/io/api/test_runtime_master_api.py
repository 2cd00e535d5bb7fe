"""What a worker asks of the master, over a real socket."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.deadlines import missed
from tests.support.fake_master import changes_of
from tests.support.runtime import InstantBus, worker_of
from unified.api.runtime import PrimeMasterApi
from unified.api.runtime.master_api import MasterStatus, _connected
from unified.client.connection import MasterConnection
from unified.client.handle import JobHandle
from unified.errors import RefusedError, UsageError
from unified.job.enums import MasterStage
from unified.job.names import parse_worker
from unified.protocol.client_master import (
    Changes,
    Done,
    GetJob,
    JobStatus,
    Refused,
    RestartWorkers,
    StopJob,
    WorkerStatus,
)
from unified.protocol.records import Reachability, Stage, WorkerState
from unified.worker.context import current_worker, set_current_worker


def status(stage: Stage, exit_code: int | None = None, **more: Any) -> JobStatus:
    return JobStatus(job_id="job-1", name="job", stage=stage, exit_code=exit_code, num_restarts=2, **more)


def told(stage: Stage, version: int, **more: Any) -> Changes:
    """Return the answer to a watch."""
    return changes_of(status(stage, **more), version)


def incarnation(worker: str, incarnation: int, state: WorkerState) -> WorkerStatus:
    role, rank = parse_worker(worker)
    return WorkerStatus(
        name=worker, role=role, rank=rank, local_rank=0, node_rank=rank, incarnation=incarnation, state=state
    )


@pytest.fixture
def master(fake_master: Any) -> Iterator[Any]:
    set_current_worker(worker_of(InstantBus(), master=fake_master.address, trainer=1, rollout=2))
    yield fake_master
    _connected(fake_master.address, None).close()
    _connected.cache_clear()
    set_current_worker(None)


async def test_status(master: Any) -> None:
    master.respond = lambda message: status(Stage.RUNNING)
    expected = MasterStatus(MasterStage.RUNNING, None, 2)
    assert PrimeMasterApi.get_status() == expected
    assert await PrimeMasterApi.get_status.async_call() == expected
    assert PrimeMasterApi.get_status().stage == "RUNNING"
    assert master.requests[0] == GetJob(job="job-1")


def test_wait_asks_again_until_the_outcome_is_decided(master: Any) -> None:
    answers = iter([told(Stage.RUNNING, 4), told(Stage.STOPPING, 5, outcome=130)])
    master.respond = lambda message: next(answers)
    assert PrimeMasterApi.wait() == 130
    assert [request.after_version for request in master.requests] == [-1, 4]


ROLLOUT = "rollout_2-1_1-0"


def test_a_restart_returns_when_the_new_incarnations_are_ready(master: Any) -> None:
    """The old incarnation is taken for ended before its successor is waited for, so that no call meets it."""
    heard: list[Any] = []
    current_worker().bus.update_directory = heard.extend  # type: ignore[method-assign, assignment]
    incarnations = iter(
        [
            (0, WorkerState.STOPPING),
            (0, WorkerState.PENDING),
            (1, WorkerState.PENDING),
            (1, WorkerState.STARTING),
            (1, WorkerState.READY),
        ]
    )
    seen: list[tuple[int, int]] = []

    def respond(message: Any) -> Any:
        if isinstance(message, RestartWorkers):
            return Done(incarnations={ROLLOUT: 1, "trainer_1-0_1-0": 3})
        seen.append((message.after_version, len(heard)))
        trainer = incarnation("trainer_1-0_1-0", 3, WorkerState.FINISHED)
        return told(Stage.RUNNING, len(seen), workers=[incarnation(ROLLOUT, *next(incarnations)), trainer])

    master.respond = respond
    PrimeMasterApi.restart_actors(["rollout-1"])
    assert seen == [(-1, 1), (1, 1), (2, 1), (3, 1), (4, 1)]
    (entry,) = heard  # none about this worker itself
    assert (entry.worker, entry.incarnation, entry.state) == (ROLLOUT, 0, Reachability.DEAD)


def test_a_restart_in_a_job_that_ends_is_an_error(master: Any) -> None:
    answers = iter([Done(incarnations={ROLLOUT: 1}), told(Stage.STOPPING, 2, outcome=1, reason="failed: why")])
    current_worker().bus.update_directory = lambda entries: None  # type: ignore[method-assign]
    master.respond = lambda message: next(answers)
    with pytest.raises(RefusedError, match="job-1 ends before all workers have restarted: failed: why") as caught:
        PrimeMasterApi.restart_actors(["rollout-1"])
    assert caught.value.code == "ended"


def test_a_handle_restarts_its_job_or_some_of_its_workers(master: Any) -> None:
    answers = iter([Done(incarnations={ROLLOUT: 1}), *[told(Stage.INIT, number) for number in range(1000)]])
    master.respond = lambda message: next(answers)
    with JobHandle(MasterConnection(master.address), "job-1") as handle:
        with pytest.raises(TimeoutError, match=r"rollout_2-1_1-0 of job job-1 restarted, and not within 0\.05 s"):
            handle.restart("rollout-1", timeout=missed(0.05))
        master.respond = lambda message: Done()
        handle.restart()
    asked = [request for request in master.requests if isinstance(request, RestartWorkers)]
    assert asked == [RestartWorkers(job="job-1", workers=["rollout-1"]), RestartWorkers(job="job-1", workers=[])]


def test_restart_and_stop(master: Any) -> None:
    master.respond = lambda message: Done()
    PrimeMasterApi.restart_actors(["rollout-1", "trainer_1-0_1-0"])
    PrimeMasterApi.restart_actors(actor_names=["rollout-0"])
    PrimeMasterApi.restart_actors([])  # nobody, not everybody
    PrimeMasterApi.restart()
    PrimeMasterApi.stop()
    assert master.requests == [
        RestartWorkers(job="job-1", workers=["rollout_2-1_1-0", "trainer_1-0_1-0"]),
        RestartWorkers(job="job-1", workers=["rollout_2-0_1-0"]),
        RestartWorkers(job="job-1", workers=[]),
        StopJob(job="job-1", reason="asked by worker trainer_1-0_1-0"),
    ]
    with pytest.raises(UsageError, match="No actor is named 'rollout-9'"):
        PrimeMasterApi.restart_actors(["rollout-9"])


def test_no_is_an_error_with_its_reason(master: Any) -> None:
    master.respond = lambda message: Refused(code="ended", reason="job job-1 has ended")
    with pytest.raises(RefusedError, match="job job-1 has ended"):
        PrimeMasterApi.restart()
