"""One agent a node id on a host; what a killed one left is found by its marks and nothing else is touched."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.agents import AgentProcess, PlayedMaster, a_job, a_worker, eventually
from unified import process
from unified.bus.shm.files import GRACE_S
from unified.config.cgroups import Limits
from unified.config.ports import address_towards
from unified.protocol.records import WorkerState
from unified_agent.host_resources import cpus, disk_mb, interface_of, memory_mb
from unified_agent.orphans import (
    AgentRecord,
    AgentTakenError,
    NodeLock,
    claim,
    clean_up,
    clean_up_all,
    hold_name,
    kill_processes,
)
from unified_agent.spawn import last_cache_bytes

MASTER = "tcp://127.0.0.1:1"
AAA, BBB = f"aaa-{os.getpid()}", f"bbb-{os.getpid()}"
"""Incarnations of agents, for these tests alone: others of this file end theirs in another process meanwhile."""


class Sleepers:
    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, node: str, incarnation: str, **more: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "UNIFIED_AGENT_NODE": node, "UNIFIED_AGENT_INCARNATION": incarnation, **more}
        code = "import time; print(flush=True); time.sleep(60)"
        one = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
        assert one.stdout is not None
        one.stdout.readline()
        self.processes.append(one)
        return one


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    them = Sleepers()
    yield them
    for one in them.processes:
        one.kill()
        one.communicate()


def record(run_dir: Path, *, node: str = "n1", incarnation: str = AAA, start_ticks: int = 0) -> AgentRecord:
    return AgentRecord(node=node, pid=1, incarnation=incarnation, run_dir=str(run_dir), start_ticks=start_ticks)


def test_only_what_carries_node_and_incarnation_is_ended(sleepers: Sleepers, tmp_path: Path) -> None:
    ours = sleepers.start("n1", AAA)
    others = [sleepers.start("n1", BBB), sleepers.start("n2", AAA)]
    run_dir = tmp_path / "a-aaa"
    run_dir.mkdir()
    (run_dir / "inbox.sock").touch()
    assert clean_up(record(run_dir), tmp_path) == [ours.pid]
    assert not process.is_alive(ours.pid)
    assert all(process.is_alive(other.pid) for other in others)
    assert not run_dir.exists()


def test_what_holds_snapshots_may_outlive_the_workers(sleepers: Sleepers) -> None:
    worker, server = sleepers.start("n1", AAA), sleepers.start("n1", AAA, UNIFIED_AGENT_SNAPSHOTS="1")
    assert kill_processes("n1", AAA, 0, with_snapshots=False) == [worker.pid]
    assert process.is_alive(server.pid)
    assert kill_processes("n1", AAA, 0) == [server.pid]


def test_what_is_older_than_the_killed_agent_is_not_its(sleepers: Sleepers, tmp_path: Path) -> None:
    one = sleepers.start("n1", AAA)
    assert clean_up(record(tmp_path / "a-x", start_ticks=1 << 60), tmp_path) == []
    assert process.is_alive(one.pid)


def test_what_they_have_started_is_ended_too_whatever_its_environment(tmp_path: Path) -> None:
    script = "env -i setsid sleep 60 & echo $!; wait"
    env = {**os.environ, "UNIFIED_AGENT_NODE": "n1", "UNIFIED_AGENT_INCARNATION": AAA}
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE, text=True) as ours:
        assert ours.stdout is not None
        child = int(ours.stdout.readline())
        assert {ours.pid, child} <= set(kill_processes("n1", AAA, 0))
    assert not process.is_alive(child)


@pytest.mark.parametrize("name", ["other", "deeper/a-x"])
def test_only_a_run_folder_of_an_agent_is_removed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    clean_up(record(folder), tmp_path)
    assert folder.exists()


def test_a_node_id_is_held_once_in_a_cluster(tmp_path: Path) -> None:
    first = NodeLock(tmp_path, "n1", MASTER)
    first.write(record(tmp_path))
    for free in (("n2", MASTER), ("n1", "tcp://127.0.0.1:2")):
        NodeLock(tmp_path, *free).release()
    with pytest.raises(AgentTakenError, match="already runs on this host as pid 1: stop it, or give this one another"):
        NodeLock(tmp_path, "n1", MASTER)
    clean_up_all(tmp_path)
    first.release()
    NodeLock(tmp_path, "n1", MASTER).release()
    assert not list((tmp_path / "agents").iterdir())


def test_a_node_id_is_held_once_whatever_run_folder_each_agent_has() -> None:
    with hold_name("tcp://127.0.0.1:1", "n1"):
        with pytest.raises(AgentTakenError, match=f"already runs on this host as pid {os.getpid()}"):
            hold_name("tcp://127.0.0.1:1", "n1")
        hold_name("tcp://127.0.0.1:2", "n1").close()
    hold_name("tcp://127.0.0.1:1", "n1").close()


@pytest.mark.parametrize("node", ["n1", "another"])
def test_a_claim_cleans_up_after_killed_agents_of_any_cluster(sleepers: Sleepers, tmp_path: Path, node: str) -> None:
    old, other = sleepers.start("n1", AAA), sleepers.start("n1", BBB)
    killed, living = NodeLock(tmp_path, "n1", MASTER), NodeLock(tmp_path, "n1", "tcp://127.0.0.1:2")
    killed.write(record(tmp_path / "a-aaa"))
    living.write(record(tmp_path / "a-bbb", incarnation=BBB))
    os.close(killed._descriptor)  # as the kernel does for a process that is killed
    with claim(tmp_path, node, MASTER) as own:
        assert not process.is_alive(old.pid)
        assert process.is_alive(other.pid)
        assert own.run_dir.stat().st_mode & 0o777 == 0o700
    assert not own.run_dir.exists()
    living.release()
    assert not list((tmp_path / "agents").iterdir())


def test_an_agent_waits_for_another_one_that_cleans_up_after_its_predecessor(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    killed = NodeLock(tmp_path, "n1", MASTER)
    killed.write(structs.replace(record(tmp_path / "a-aaa"), pid=ended.pid))
    threading.Timer(0.5, killed.release).start()
    with claim(tmp_path, "n1", MASTER) as own:
        assert own.run_dir.is_dir()


OWNER = """
import sys, time
from unified.bus.shm.pool import SharedPool
pool = SharedPool(sys.argv[1])
exported = pool.export([bytes(300_000)])
assert exported is not None
print(flush=True)
time.sleep(60)
"""


def segments(inbox_id: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"unified-{inbox_id}-")]


def test_shared_memory_of_the_dead_goes_when_an_agent_starts_and_when_it_stops(tmp_path: Path) -> None:
    for when in ("start", "stop"):
        inbox_id = f"test{os.getpid()}{when}"
        owner = subprocess.Popen([sys.executable, "-c", OWNER, inbox_id], stdout=subprocess.PIPE)
        assert owner.stdout is not None
        owner.stdout.readline()
        assert len(segments(inbox_id)) == 1
        if when == "start":
            with claim(tmp_path, "n1", MASTER):
                assert len(segments(inbox_id)) == 1, "its process is alive"
        else:
            with claim(tmp_path, "n1", MASTER):
                owner.kill()
                owner.wait()
            assert not segments(inbox_id)
        owner.kill()
        owner.communicate()
        with claim(tmp_path, "n1", "tcp://127.0.0.1:1"):
            assert not segments(inbox_id)


SENDER = """
import os, sys
from unified.bus.shm.pool import SharedPool
pool = SharedPool(sys.argv[1])
assert pool.grant(pool.export([bytes(300_000)]), "who-never-took-it") is not None
os._exit(0)
"""


@pytest.mark.slow
def test_what_the_last_worker_sent_to_the_dead_goes_though_no_other_ends(tmp_path: Path) -> None:
    inbox_id = f"test{os.getpid()}sent"
    master = PlayedMaster()
    agent = AgentProcess(tmp_path, master.address)
    try:
        master.welcome()
        master.desire(a_worker(), jobs=[a_job("finish")])
        master.reaches("w-0#0", WorkerState.FINISHED)
        subprocess.run([sys.executable, "-c", SENDER, inbox_id], check=True)
        (name,) = segments(inbox_id)
        with open(f"/dev/shm/{name}", "rb"):  # so that a test beside this one can tell that it is not its own
            master.desire(jobs=[])
            master.reaches("w-0#0", WorkerState.EXITED)
            assert eventually(lambda: not segments(inbox_id), timeout=GRACE_S + 5), "the agent did not look again"
            assert agent.process.poll() is None
    finally:
        agent.process.terminate()
        agent.wait()
        master.hang_up()


def test_the_inventory_of_this_host(tmp_path: Path) -> None:
    assert 0 < cpus() <= (os.cpu_count() or 1)
    assert memory_mb() > 100
    assert disk_mb(tmp_path / "not/yet/there") > 0
    assert address_towards("127.0.0.1", 7077) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""


def test_the_last_cache_of_a_core(tmp_path: Path) -> None:
    for index, size in enumerate(["48K", "1024K", "32768K", "no size"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 32 << 20
    assert last_cache_bytes(tmp_path / "missing") == 0


def test_a_host_offers_no_more_than_its_control_groups_allow() -> None:
    assert (cpus(Limits(0.5, 64 << 20)), memory_mb(Limits(0.5, 64 << 20))) == (0.5, 64.0)
    everything = Limits(None, None)
    assert (cpus(Limits(1e6, 1 << 60)), memory_mb(Limits(1e6, 1 << 60))) == (cpus(everything), memory_mb(everything))
