"""What a worker asks of the master, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.runtime_world import InstantBus, worker_of
from unified.api.runtime import PrimeMasterApi
from unified.api.runtime.master_api import MasterStatus, _connected
from unified.errors import RefusedError, UsageError
from unified.job.enums import MasterStage
from unified.protocol.client_master import Done, GetJob, JobStatus, Refused, RestartWorkers, StopJob
from unified.protocol.records import Stage
from unified.worker.context import set_current_worker


def status(stage: Stage, version: int = 1, exit_code: int | None = None) -> JobStatus:
    return JobStatus(job_id="job-1", name="job", stage=stage, version=version, exit_code=exit_code, num_restarts=2)


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


def test_wait_asks_again_until_the_job_has_stopped(master: Any) -> None:
    answers = iter([status(Stage.RUNNING, 4), status(Stage.STOPPING, 5), status(Stage.STOPPED, 6, 130)])
    master.respond = lambda message: next(answers)
    assert PrimeMasterApi.wait() == 130
    assert [request.after_version for request in master.requests] == [-1, 4, 5]


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
