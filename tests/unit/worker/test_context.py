"""current_worker(): what it says, and what it says outside a worker."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.support.runtime import ENTRY, launch_of
from unified.core.directory import WorkerDirectory
from unified.errors import NotInWorkerError, UsageError
from unified.job import ElasticWorkloadDesc
from unified.job.payload import encode
from unified.job.spec import Blob, JobSpec, Resources, RoleSpec
from unified.protocol.agent_master import RunOrder
from unified.protocol.records import DirectoryEntry, Reachability
from unified.protocol.worker_agent import Launch
from unified.worker.context import Worker, current_worker, set_current_worker
from unified.worker.progress import Reporter
from unified.worker.stop import StopState


def launch(user_config: Blob | None = None) -> Launch:
    spec = JobSpec(
        name="job",
        accelerator_type="CPU",
        user_config=encode({"lr": 0.1}) if user_config is None else user_config,
        roles=[
            RoleSpec(
                name="trainer",
                kind="elastic",
                entry_point=ENTRY,
                total=4,
                per_group=2,
                collocation="g",
                resources=Resources(accelerator=0.5),
                config=encode({"top_k": 3}),
            ),
            RoleSpec(name="reward", kind="simple", entry_point=ENTRY),
        ],
    )
    return launch_of(spec, 3, incarnation=2, log_file="/log/x.err")


def make(given: Launch, **options: Any) -> Worker:
    bus = cast(Any, SimpleNamespace(directory=WorkerDirectory()))
    reporter = Reporter(lambda progress: None)
    return Worker(given, stop=StopState(), reporter=reporter, bus=bus, device="cuda:1", **options)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = make(launch())
    set_current_worker(worker)
    yield worker
    set_current_worker(None)


def test_outside_a_worker() -> None:
    with pytest.raises(NotInWorkerError, match=r"outside a worker.*not in the driver"):
        current_worker()


def test_says_who_it_is(worker: Worker) -> None:
    found = current_worker()
    assert found is worker
    info = found.actor_info
    assert (info.name, info.role, info.rank, info.world_size) == ("trainer_4-3_2-1", "trainer", 3, 4)
    assert (info.local_rank, info.local_world_size, info.node_rank, info.node) == (1, 2, 1, "n1")
    assert (info.sub_master, info.spec.backend) == ("elastic", "elastic")
    assert (found.incarnation, found.round, found.device) == (2, 0, "cuda:1")
    assert (found.master_address, found.log_file) == ("tcp://127.0.0.1:7077", "/log/x.err")
    assert found.job_info.user_config == {"lr": 0.1}
    assert (found.job_info.name, found.job_info.job_id, found.job_info.accelerator_type) == ("job", "job-1", "CPU")
    assert found.job_info.accelerator_type.value == "CPU"


def test_says_how_much_time_its_allocation_has(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIFIED_ALLOCATION_ENDS_AT", raising=False)
    assert worker.time_left() is None
    monkeypatch.setenv("UNIFIED_ALLOCATION_ENDS_AT", "")
    assert worker.time_left() is None
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    monkeypatch.setenv("UNIFIED_ALLOCATION_ENDS_AT", "1000090.0")
    assert worker.time_left() == 90.0
    monkeypatch.setenv("UNIFIED_ALLOCATION_ENDS_AT", "999999.0")
    assert worker.time_left() == 0.0


def test_describes_its_workload(worker: Worker) -> None:
    spec = worker.actor_info.spec
    assert isinstance(spec, ElasticWorkloadDesc)
    found = (spec.backend, spec.entry_point, spec.group, spec.total, spec.per_group)
    assert found == ("elastic", "train.run", "g", 4, 2)
    assert (spec.resource.accelerator, spec.config) == (0.5, {"top_k": 3})
    assert worker.actor_info.spec is spec
    assert worker.workers_of("reward")[0].spec.config == {}


def test_prints_readably(worker: Worker) -> None:
    assert (
        str(worker.job_info) == "JobInfo(name='job', job_id='job-1', accelerator_type='CPU', user_config={'lr': 0.1})"
    )
    assert str(worker.actor_info).startswith("ActorInfo(name='trainer_4-3_2-1', role='trainer', rank=3, ")
    assert "entry_point" not in str(worker.actor_info)
    assert str(worker) == "Worker('trainer_4-3_2-1', job='job-1', incarnation=2)"


def test_config_that_cannot_be_decoded_is_still_printable() -> None:
    broken = make(launch(Blob(codec="pickle", data=b"nonsense")))
    assert "user_config=<cannot be decoded: " in str(broken.job_info)


def test_config_is_decoded_once(worker: Worker) -> None:
    assert worker.job_info.user_config is worker.job_info.user_config


def test_knows_the_other_workers(worker: Worker) -> None:
    assert worker.roles == ["trainer", "reward"]
    assert [actor.rank for actor in worker.workers_of("trainer")] == [0, 1, 2, 3]
    assert worker.workers_of("reward")[0].name == "reward_1-0_1-0"
    assert worker.workers_of("reward")[0].sub_master is None
    assert worker.workers_of("nobody") == []


def test_learns_nodes_from_the_newest_incarnation(worker: Worker) -> None:
    name = "reward_1-0_1-0"

    def entry(incarnation: int, node: str) -> DirectoryEntry:
        return DirectoryEntry(worker=name, incarnation=incarnation, state=Reachability.ALIVE, node=node)

    worker.bus.directory.merge([entry(1, "n7"), entry(0, "n2")])
    assert worker.workers_of("reward")[0].node == "n7"


def test_round_changes_rank_and_world_size(worker: Worker) -> None:
    worker._begin_round(RunOrder(round=5, rank=1, world_size=2))
    assert (worker.round, worker.actor_info.rank, worker.actor_info.world_size) == (5, 1, 2)
    assert worker.actor_info.name == "trainer_4-3_2-1"


def test_callbacks_at_the_end_of_the_entry_point(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []

    def fail() -> None:
        called.append("fail")
        raise ValueError("broken")

    def note() -> None:
        called.append("note")

    for callback in (fail, note, note):
        worker.on_finish(callback)
    worker._finish()
    assert called == ["fail", "note"]
    assert "broken" in capsys.readouterr().err


def test_the_agent_is_asked_for_the_ports_that_are_missing() -> None:
    asked: list[int] = []

    def hold(num: int) -> list[int]:
        asked.append(num)
        return list(range(20_100, 20_100 + num))

    worker = make(msgspec.structs.replace(launch(), ports=[20_100]), hold_ports=hold)
    assert (worker.ports(), worker.ports(1), asked) == ([20_100], [20_100], [])
    assert worker.ports(3) == [20_100, 20_101, 20_102]
    first = worker.ports(2)
    assert (first, asked) == ([20_100, 20_101], [3])
    first.clear()
    assert worker.ports(2) == [20_100, 20_101], "the list is the caller's"
    assert len(worker.ports(64)) == 64
    for wrong in (0, -1, 65, 2.5, "2", None):
        with pytest.raises(UsageError, match="a worker may have 1 to 64"):
            worker.ports(cast(Any, wrong))


def test_a_worker_without_an_agent_has_no_ports(worker: Worker) -> None:
    with pytest.raises(
        UsageError, match=r"ports\(2\): Worker\('trainer_4-3_2-1', job='job-1', incarnation=2\) has no agent"
    ):
        worker.ports(2)
