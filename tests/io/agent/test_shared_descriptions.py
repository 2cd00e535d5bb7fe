"""The description of a job, which the processes of a node share, on a real agent with real workers."""

import functools
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agents import AgentProcess, PlayedMaster, a_job, a_worker
from unified.job.shared_spec import SharedSpec, map_spec
from unified.job.spec import Blob, EntryPoint, JobSpec, RoleSpec
from unified.protocol.agent_master import DesiredJob, ObservedWorkers
from unified.protocol.records import WorkerState

CONFIG_BYTES = 16 * 2**20
NUM = 8
ROLE = RoleSpec(name="w", kind="simple", entry_point=EntryPoint(kind="attribute", target="x"))


@pytest.fixture
def master() -> Iterator[PlayedMaster]:
    one = PlayedMaster()
    yield one
    one.hang_up()


def with_config(job: DesiredJob, nbytes: int) -> DesiredJob:
    assert job.spec is not None
    config = Blob(codec="msgpack", data=msgspec.msgpack.encode(os.urandom(nbytes)))
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, user_config=config))


def are_alone(job_id: str, message: ObservedWorkers) -> bool:
    """The workers of that job are up, and those of others gone."""
    found = [worker for worker in message.workers if worker.job_id == job_id]
    others = [worker for worker in message.workers if worker.job_id != job_id]
    is_up = len(found) == NUM and all(worker.state is WorkerState.FINISHED for worker in found)
    return is_up and all(worker.state is WorkerState.EXITED for worker in others)


def memory_bytes(agent: AgentProcess) -> int:
    """Memory of the agent and everything that it has started; pages that they share count once."""
    total = 0
    for pid in [agent.process.pid, *agent.descendants()]:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_a_description_is_read_without_a_copy_of_its_bytes() -> None:
    data = os.urandom(2**20)
    spec = JobSpec(name="job", roles=[ROLE], user_config=Blob(codec="msgpack", data=data))
    shared = SharedSpec(spec)
    found = map_spec(shared.descriptor, shared.num_bytes)
    with pytest.raises(PermissionError):
        os.write(shared.descriptor, b"x")
    shared.close()
    assert found == spec
    assert isinstance(found.user_config.data, memoryview)
    assert found.user_config.data.readonly
    assert repr(found.user_config) == "Blob(msgpack, 1048576 bytes)"


def test_workers_and_agent_hold_one_copy_of_a_config(
    master: PlayedMaster, tmp_path: Path, agents: list[AgentProcess]
) -> None:
    agent = AgentProcess(tmp_path, master.address)
    agents.append(agent)
    master.welcome(lease_s=60.0)  # it does not connect anew while the test counts memory and answers nothing
    job = a_job("finish")
    workers = [a_worker(rank) for rank in range(NUM)]
    memory: list[int] = []
    for job_id, nbytes in (("job-1", 10), ("job-2", CONFIG_BYTES)):
        named = msgspec.structs.replace(with_config(job, nbytes), job_id=job_id)
        master.desire(*(msgspec.structs.replace(one, job_id=job_id) for one in workers), jobs=[named])
        master.hear(ObservedWorkers, functools.partial(are_alone, job_id))
        memory.append(memory_bytes(agent))
    assert (memory[1] - memory[0]) / CONFIG_BYTES < 3, "once a worker would be 8, and once more in the agent"


def test_a_worker_gets_its_description_where_it_cannot_be_shared(
    master: PlayedMaster, tmp_path: Path, agents: list[AgentProcess]
) -> None:
    """A file in memory of no size but 0 may grow: then the description goes with the launch."""
    agent = AgentProcess(tmp_path, master.address)
    agents.append(agent)
    master.welcome()
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
    master.desire(a_worker(), jobs=[with_config(a_job("finish"), 2**20)])
    master.reaches("w-0#0", WorkerState.FINISHED)
    assert "event=description-copied" in agent.stderr
