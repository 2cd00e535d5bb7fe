"""Rules about runs: one job a run id, conflicts, resume; and how often the cluster is asked about them."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.training_backend import MemoryBackend
from tests.unit.gateway.test_gateway_schemas import LEAST
from unified.errors import MasterUnreachableError, RefusedError
from unified_gateway import runs as runs_module
from unified_gateway.backend import RunRecord
from unified_gateway.http.limits import RateLimits, TokenBucket
from unified_gateway.plan import StoredRequest
from unified_gateway.runs import RunCache, RunConflictError, RunNotFoundError, RunService
from unified_gateway.schemas import ResumeRequest, TrainingRequest


def request(**fields: Any) -> TrainingRequest:
    return TrainingRequest.model_validate({**LEAST, "run_id": "r", **fields})


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def service(backend: MemoryBackend) -> RunService:
    return RunService(backend)


async def test_a_payload_begins_a_run_and_again_it_finds_that_one(service: RunService, backend: MemoryBackend) -> None:
    first = await service.submit(request(env={"A": "1"}))
    again = await service.submit(request(env={"A": "1"}))
    assert (first.is_new, again.is_new) == (True, False)
    assert first.run.job_id == again.run.job_id == "train-r-1"
    assert len(backend.attempts) == 1


async def test_of_many_at_once_one_begins_the_run(backend: MemoryBackend) -> None:
    services = [RunService(backend) for _ in range(4)]  # gateways
    outcomes = await asyncio.gather(*(services[turn % 4].submit(request()) for turn in range(200)))
    assert len(backend.attempts) == 1
    assert sum(outcome.is_new for outcome in outcomes) == 1
    assert {outcome.run.job_id for outcome in outcomes} == {"train-r-1"}


async def test_of_many_names_for_one_run_at_once_one_wins(service: RunService, backend: MemoryBackend) -> None:
    asked = [service.submit(request(job_name=f"name-{turn}")) for turn in range(20)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert len(backend.attempts) == 1
    assert sum(isinstance(outcome, RunConflictError) for outcome in outcomes) == 19


async def test_another_payload_of_a_run_that_goes_on_is_a_conflict(service: RunService) -> None:
    await service.submit(request(env={"A": "1"}))
    with pytest.raises(RunConflictError, match=r"goes on as train-r .* different: num_nodes, env.A") as found:
        await service.submit(request(num_nodes=2, env={"A": "2"}, resume_from_checkpoint=True))
    assert found.value.differences["num_nodes"] == (1, 2)
    assert "2" not in found.value.differences["env.A"]


async def test_a_failed_run_is_shown_and_begins_again_only_with_resume(
    service: RunService, backend: MemoryBackend
) -> None:
    await service.submit(request())
    backend.end("train-r")
    shown = await service.submit(request())
    assert (shown.is_new, shown.run.status) == (False, "failed")
    again = await service.submit(request(resume_from_checkpoint=True))
    assert (again.is_new, again.run.job_id) == (True, "train-r-2")
    assert backend.plans[-1].options.resume
    assert backend.plans[0].options.attempt_id != backend.plans[1].options.attempt_id


async def test_a_run_that_succeeded_does_not_begin_again(service: RunService, backend: MemoryBackend) -> None:
    await service.submit(request())
    backend.end("train-r", 0)
    outcome = await service.submit(request(resume_from_checkpoint=True))
    assert (outcome.is_new, outcome.run.status) == (False, "succeeded")


async def test_another_payload_of_a_run_that_has_ended_has_to_resume_it(
    service: RunService, backend: MemoryBackend
) -> None:
    await service.submit(request(framework="meta", extra_args={"max_steps": 5}))
    backend.end("train-r", 0)
    longer: dict[str, Any] = {"framework": "meta", "extra_args": {"max_steps": 9}}
    with pytest.raises(RunConflictError, match="set resume_from_checkpoint"):
        await service.submit(request(**longer))
    with pytest.raises(RunConflictError, match="cannot be resumed with another model_id: choose"):
        await service.submit(request(**longer, model_id="other", resume_from_checkpoint=True))
    assert (await service.submit(request(**longer, resume_from_checkpoint=True))).is_new


async def test_a_run_that_ended_is_resumed_under_another_name(service: RunService, backend: MemoryBackend) -> None:
    await service.submit(request())
    backend.end("train-r")
    with pytest.raises(RunConflictError, match="different: job_name"):
        await service.submit(request(job_name="other"))
    outcome = await service.submit(request(job_name="other", resume_from_checkpoint=True))
    assert outcome.run.name == "other"


async def test_the_name_of_another_run_is_taken_while_that_goes_on(service: RunService, backend: MemoryBackend) -> None:
    await service.submit(request(run_id="a", job_name="mine"))
    with pytest.raises(RunConflictError, match="another job, mine-1, has the name mine"):
        await service.submit(request(run_id="b", job_name="mine"))
    backend.end("mine")
    assert (await service.submit(request(run_id="b", job_name="mine"))).run.job_id == "mine-2"


async def test_a_job_that_is_no_run_is_neither_shown_nor_stopped_nor_replaced(
    service: RunService, backend: MemoryBackend
) -> None:
    other = RunRecord(
        name="train-r", namespace="", run_id="", framework="", status="running", job_id="train-r-0", submitted_at=1.0
    )
    backend.attempts.append(other)
    for ask in (service.run("train-r"), service.stop("train-r", force=True), service.resume("train-r", NO_CHANGES)):
        with pytest.raises(RunNotFoundError):
            await ask
    with pytest.raises(RunConflictError, match=r"another job, .* has the name"):
        await service.submit(request())
    assert backend.attempts == [other]


NO_CHANGES = ResumeRequest()


async def test_a_resume_takes_the_payload_that_is_kept_and_leaves_secrets_to_the_cluster(
    service: RunService, backend: MemoryBackend
) -> None:
    await service.submit(request(framework="meta", env={"A": "secret"}, extra_args={"max_steps": 5}))
    with pytest.raises(RunConflictError, match="goes on as train-r: stop it"):
        await service.resume("train-r", NO_CHANGES)
    backend.end("train-r")
    run = await service.resume("train-r", ResumeRequest(extra_args={"max_steps": 9}))
    plan = backend.plans[-1]
    assert run.job_id == "train-r-2"
    assert (plan.kept_env, plan.request.env) == (("A",), {})
    assert (plan.request.extra_args, plan.request.resume_from_checkpoint) == ({"max_steps": 9}, True)
    same = request(framework="meta", env={"A": "secret"}, extra_args={"max_steps": 9})
    assert not (await service.submit(same)).is_new
    with pytest.raises(RunConflictError, match=r"env\.A"):
        await service.submit(same.model_copy(update={"env": {"A": "other"}}))


async def test_a_submission_whose_answer_was_lost_is_known_by_its_attempt(
    service: RunService, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = MemoryBackend.submit

    async def lose(self: MemoryBackend, plan: Any, *, follows: str) -> Any:
        await submit(self, plan, follows=follows)
        return await submit(self, plan, follows=follows)  # sent again: refused

    monkeypatch.setattr(MemoryBackend, "submit", lose)
    assert (await service.submit(request())).is_new
    assert len(backend.attempts) == 1


async def test_one_who_always_comes_too_late_is_told_so(
    service: RunService, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hide(self: MemoryBackend, name: str) -> None:
        return None

    await service.submit(request())
    monkeypatch.setattr(MemoryBackend, "get", hide)
    monkeypatch.setattr(MemoryBackend, "find_run", hide)
    with pytest.raises(RefusedError) as found:
        await service.submit(request(num_nodes=2))
    assert found.value.code == "name-taken"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_however_many_ask_the_list_is_read_once_a_second(service: RunService, backend: MemoryBackend) -> None:
    await service.submit(request())
    clock = Clock()
    cache = RunCache(backend, clock=clock)
    backend.calls.clear()
    await asyncio.gather(*(cache.run("train-r") for _ in range(100)))
    clock.now += 0.99
    await asyncio.gather(*(cache.run("train-r") for _ in range(100)))
    assert backend.calls == ["runs"]
    clock.now += 0.02
    await asyncio.gather(*(cache.run("train-r") for _ in range(100)))
    assert backend.calls == ["runs", "runs"]
    clock.now += 100
    assert backend.calls == ["runs", "runs"]  # nobody asked


async def test_an_error_is_that_of_all_who_wait_and_holds_for_a_second(backend: MemoryBackend) -> None:
    clock = Clock()
    cache = RunCache(backend, clock=clock)
    backend.is_away = True
    found = await asyncio.gather(*(cache.snapshot() for _ in range(20)), return_exceptions=True)
    assert all(isinstance(each, MasterUnreachableError) for each in found)
    clock.now += 0.9
    with pytest.raises(MasterUnreachableError):
        await cache.snapshot()
    assert backend.calls == ["runs"]
    backend.is_away = False
    clock.now += 1.0
    assert (await cache.snapshot()).attempts == []


async def test_a_reader_that_goes_away_does_not_end_the_reading_of_others(backend: MemoryBackend) -> None:
    cache = RunCache(backend, clock=Clock())
    first = asyncio.create_task(cache.snapshot())
    second = asyncio.create_task(cache.snapshot())
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).attempts == []
    assert backend.calls == ["runs"]


async def test_what_was_submitted_here_is_seen_at_once_and_then_as_the_list_has_it(
    service: RunService, backend: MemoryBackend
) -> None:
    clock = Clock()
    cache = RunCache(backend, clock=clock)
    await cache.snapshot()
    run = (await service.submit(request())).run
    cache.put(run)
    assert (await cache.run("train-r")) == run
    cache.put(replace(run, status="running"))
    assert [found.status for found in (await cache.snapshot()).attempts] == ["running"]
    clock.now += 1.0
    found = await cache.run("train-r")
    assert (found and found.status, backend.calls.count("runs")) == ("submitted", 2)


async def test_runs_that_are_not_in_the_list_are_asked_for_within_limits(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "MISSES_BURST", 5.0)
    monkeypatch.setattr(runs_module, "MISSES_PER_S", 0.001)
    now = [0.0]
    cache = RunCache(backend, clock=lambda: now[0])
    await cache.snapshot()
    await RunService(backend).submit(request())
    backend.calls.clear()
    found = await cache.run("train-r")
    assert (found and found.run_id, backend.calls) == ("r", ["get"])
    assert [await cache.run(f"none-{turn}") for turn in range(4)] == [None] * 4
    assert backend.calls.count("get") == 5
    await RunService(backend).submit(request(run_id="late"))
    backend.calls.clear()
    now[0] = runs_module.MAX_AGE_S - 0.01
    waiting = asyncio.create_task(cache.run("train-late"))
    await asyncio.sleep(0)
    now[0] = runs_module.MAX_AGE_S
    late = await waiting  # as the next list has it
    assert (late and late.run_id, "get" in backend.calls) == ("late", False)


async def test_a_list_that_does_not_come_is_not_waited_for(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(self: MemoryBackend) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MemoryBackend, "runs", hang)
    monkeypatch.setattr(runs_module, "LIST_WITHIN_S", 0.05)
    with pytest.raises(MasterUnreachableError, match="did not list its runs within"):
        await RunCache(backend).snapshot()


async def test_a_resume_whose_answer_was_lost_is_known_by_its_attempt(
    service: RunService, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.submit(request())
    backend.end("train-r")
    submit = MemoryBackend.submit

    async def lose(self: MemoryBackend, plan: Any, *, follows: str) -> Any:
        await submit(self, plan, follows=follows)
        return await submit(self, plan, follows=follows)

    monkeypatch.setattr(MemoryBackend, "submit", lose)
    assert (await service.resume("train-r", NO_CHANGES)).job_id == "train-r-2"
    assert len(backend.attempts) == 2


async def test_a_run_under_two_names_is_judged_by_its_newest_attempt(
    service: RunService, backend: MemoryBackend
) -> None:
    await service.submit(request())
    backend.end("train-r")
    await service.submit(request(job_name="other", resume_from_checkpoint=True))
    with pytest.raises(RunConflictError, match="goes on as other"):
        await service.submit(request())
    backend.end("other")
    again = await service.submit(request(resume_from_checkpoint=True))
    assert (again.is_new, again.run.job_id) == (True, "train-r-3")
    assert (await service.submit(request())).run.job_id == "train-r-3"


async def test_the_newest_attempt_of_each_name_is_shown(service: RunService, backend: MemoryBackend) -> None:
    await service.submit(request())
    backend.end("train-r")
    await service.resume("train-r", NO_CHANGES)
    snapshot = await RunCache(backend).snapshot()
    assert [run.job_id for run in snapshot.attempts] == ["train-r-2", "train-r-1"]
    assert snapshot.by_name["train-r"].job_id == "train-r-2"
    assert StoredRequest.read(backend.attempts[1].annotations) is not None


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 3.0, clock=clock)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s() == pytest.approx(0.1)
    clock.now += 0.11
    assert [bucket.take(), bucket.take()] == [True, False]
    clock.now += 100
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


def test_a_rate_is_that_of_one_client_and_of_writes_or_reads() -> None:
    clock = Clock()
    limits = RateLimits(writes=(1.0, 2.0), reads=(0.0, 0.0), clock=clock)
    assert [limits.admit("a", is_write=True) for _ in range(3)] == [None, None, pytest.approx(1.0)]
    assert limits.admit("b", is_write=True) is None
    assert [limits.admit("a", is_write=False) for _ in range(1000)] == [None] * 1000
