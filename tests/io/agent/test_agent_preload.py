"""Zygotes of jobs that preload modules: which one forks a job's workers, how long it lives, and waits for it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.agents import AgentProcess, PlayedMaster, a_job, a_worker, eventually
from unified import process
from unified.protocol.agent_master import AgentHeartbeat, DesiredJob, ObservedWorker
from unified.protocol.records import WorkerState

pytestmark = pytest.mark.processes


@pytest.fixture
def master() -> Iterator[PlayedMaster]:
    one = PlayedMaster()
    yield one
    one.hang_up()


def preloading(*modules: str) -> DesiredJob:
    job = a_job("finish")
    assert job.spec is not None
    return structs.replace(job, spec=structs.replace(job.spec, preload=list(modules)))


def zygote_of(worker: ObservedWorker) -> int:
    found = process.facts(worker.pid)
    assert found is not None
    return found.parent


def test_a_job_has_a_zygote_with_its_preload_while_it_lives(
    agents: list[AgentProcess], master: PlayedMaster, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(f"import os\nprint(os.getpid(), file=open({str(tmp_path / 'pids')!r}, 'a'))\n")
    agents.append(agent := AgentProcess(tmp_path, master.address))
    master.welcome()
    master.desire(a_worker(0), a_worker(1), jobs=[preloading("mine")])
    workers = [master.reaches(f"w-{rank}#0", WorkerState.FINISHED) for rank in range(2)]
    (zygote_of_both,) = {zygote_of(worker) for worker in workers}
    assert (tmp_path / "pids").read_text() == f"{zygote_of_both}\n"
    assert len(agent.descendants()) == 4
    master.desire(jobs=[preloading("mine")])
    master.observe(lambda seen: not seen or all(worker.state is WorkerState.EXITED for worker in seen.values()))
    master.desire(a_worker(0, 1), jobs=[preloading("mine")])
    assert zygote_of(master.reaches("w-0#1", WorkerState.FINISHED)) == zygote_of_both
    master.desire(jobs=[])
    eventually(lambda: len(agent.descendants()) == 1, message="its zygote stays")
    master.desire(a_worker(0, 2), jobs=[preloading()])
    worker = master.reaches("w-0#2", WorkerState.FINISHED)
    assert set(agent.descendants()) == {zygote_of(worker), worker.pid}


def test_the_agents_own_zygote_serves_a_job_whose_preload_it_has(
    agents: list[AgentProcess], master: PlayedMaster, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").touch()
    agents.append(
        agent := AgentProcess(tmp_path, master.address, "--preload", "mine,no_such", "--preload", "json.tool")
    )
    master.welcome()
    master.desire(a_worker(0), jobs=[preloading("json.tool", "mine")])
    worker = master.reaches("w-0#0", WorkerState.FINISHED)
    assert set(agent.descendants()) == {zygote_of(worker), worker.pid}


def test_a_preload_that_ends_its_process_is_named(
    agents: list[AgentProcess], master: PlayedMaster, tmp_path: Path
) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    agents.append(AgentProcess(tmp_path, master.address))
    master.welcome()
    master.desire(a_worker(0), jobs=[preloading("ends")])
    failure = master.failure()
    assert failure.category == "setup"
    assert failure.summary.endswith("(exited with code 3). It was told to preload ends.")


def test_a_worker_waits_for_a_long_preload_and_says_so(
    agents: list[AgentProcess], master: PlayedMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_START_S", "0.5")
    monkeypatch.setenv("UNIFIED_FORK_S", "0.5")
    os.mkfifo(tmp_path / "go")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'go')!r}).read()\n")
    agents.append(AgentProcess(tmp_path, master.address))
    master.welcome()
    master.desire(a_worker(0, is_told_to_run=False), jobs=[preloading("slow")])
    waits = master.observe(lambda seen: "w-0#0" in seen and seen["w-0#0"].progress is not None)["w-0#0"]
    assert waits.progress is not None
    assert (waits.state, waits.progress.waits_for) == (WorkerState.STARTING, "the preload of slow")
    for _ in range(15):  # of 0.1 s each
        master.hear(AgentHeartbeat)
    (tmp_path / "go").write_bytes(b"")
    worker = master.reaches("w-0#0", WorkerState.READY)
    assert worker.progress is not None
    assert worker.progress.waits_for == ""


def test_a_zygote_that_hangs_in_an_import_ends_with_its_job(
    agents: list[AgentProcess], master: PlayedMaster, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text(f"open({str(tmp_path / 'begun')!r}, 'w')\nimport time\ntime.sleep(600)\n")
    agents.append(agent := AgentProcess(tmp_path, master.address))
    master.welcome()
    master.desire(a_worker(0), jobs=[preloading("hangs")])
    eventually((tmp_path / "begun").exists)
    master.desire(jobs=[])
    eventually(lambda: len(agent.descendants()) == 1, message="its zygote hangs on")
