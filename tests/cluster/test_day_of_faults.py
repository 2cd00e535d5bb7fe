"""One job on one real cluster through a day of faults, one after another; at the end no row was lost or trained twice.

A table of the hours is printed at the end. Afterwards the cluster's master begins anew with no state, then with a
damaged log, and at last a stranger listens at its address.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import PROGRAMS, Cluster
from unified import process
from unified.api.builder import DLJob, DLJobBuilder
from unified.client.daemons import marked_processes
from unified.client.handle import JobHandle
from unified.client.report import state_lines
from unified.protocol.client_master import DrainNode, Explain, JobStatus, Story
from unified.protocol.records import Stage, WorkerState
from unified.testing import LocalCluster, eventually
from unified_agent.spawn import MARKER_SNAPSHOTS

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN_S = 200.0
NODES = 4
ROWS = 24


def a_day(folder: Path) -> DLJob:
    builder: Any = DLJobBuilder().node_num(NODES).device_per_node(2).device_type("CPU")
    builder = builder.global_env({"TEST_FOLDER": str(folder)})
    builder.role("train").train("day_of_faults.train").total(2).per_group(1).max_restart(20).per_node_max_failure(
        20
    ).end()
    service = builder.workload("svc", "day_of_faults.Service").resource(cpu=0.1).total(4).per_group(4)
    service.restart_alone().per_node_max_failure(3).end()
    builder.workload("caller", "day_of_faults.caller").resource(cpu=0.1).end()
    builder.workload("pair", "day_of_faults.pair").resource(cpu=0.1).total(2).end()
    job: DLJob = builder.build()
    return job


class Day:
    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.hours: list[tuple[str, float]] = []
        self.handle: JobHandle = cluster.submit(a_day(folder), "day", restart_backoff=0.0)

    def hour(self, name: str, act: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            act()
        except BaseException as error:
            error.add_note(f"in the hour {name!r}, after {[done for done, _ in self.hours]}")
            error.add_note("\n".join(list(self.handle.logs())[-40:]))
            raise
        self.hours.append((name, time.monotonic() - begun))

    @property
    def status(self) -> JobStatus:
        return self.cluster.status(self.handle.job_id)

    def worker(self, role: str, rank: int = 0) -> Any:
        return next(each for each in self.status.workers if (each.role, each.rank) == (role, rank))

    def round(self, rank: int) -> list[int]:
        """Round, first step, incarnation and pid of a rank of the training, as it said last."""
        file = self.folder / f"round-{rank}"
        return [int(word) for word in file.read_text().split()] if file.exists() else [0, 0, 0, 0]

    def step(self) -> int:
        progress = self.worker("train").progress
        return 0 if progress is None or progress.step is None else progress.step

    def goes_on(self, after: int) -> None:
        """Wait until both ranks train in a later round, and steps are committed there."""
        eventually(lambda: min(self.round(rank)[0] for rank in (0, 1)) > after, WITHIN_S, "no later round began")
        begun = self.round(0)[1]
        eventually(lambda: self.step() > begun + 3, WITHIN_S, "no step was committed in the later round")

    # -- the hours ---------------------------------------------------------------------------------------------------

    def begins(self) -> None:
        eventually(lambda: self.status.stage is Stage.RUNNING, WITHIN_S)
        self.goes_on(0)

    def odd_calls(self) -> None:
        file = self.folder / "told.json"
        eventually(file.exists, WITHIN_S, "a call had no answer")
        told = json.loads(file.read_text())
        assert told["stray_error"].startswith(r"RemoteValueError: no file \udcff"), told
        assert told["stray_note"].startswith("RemoteValueError: text"), told
        assert "KeyError(0)" in told["group"], told
        assert "KeyError(1)" in told["group"], told
        assert "SystemExit" in told["exits_when_read"], told
        assert "wait for one another" in told["own_loop"], told
        assert "wait for one another" in told["through_another"], told
        assert told["echo"] == "1", told

    def queues_in_a_cycle(self) -> None:
        def said() -> str:
            return " ".join(state_lines(self.status, 0.0))

        eventually(lambda: "of-0" in said() and "of-1" in said(), WITHIN_S, "no cycle is named")
        (self.folder / "unblock").touch()
        eventually(lambda: self.worker("pair", 1).state is WorkerState.FINISHED, WITHIN_S)
        eventually(lambda: "of-0" not in said(), WITHIN_S, "the cycle is still named")

    def zygote_dies(self) -> None:
        before, first = self.status.budgets, self.worker("svc")
        found = process.facts(first.pid)
        assert found is not None
        round_before = self.round(0)[0]
        shares = first.node in {self.worker("train", rank).node for rank in (0, 1)}
        os.kill(found.parent, signal.SIGKILL)
        eventually(lambda: all(self.worker("svc", rank).incarnation == 1 for rank in range(4)), WITHIN_S)
        eventually(lambda: self.worker("svc").state is WorkerState.SERVING, WITHIN_S)
        if shares:
            self.goes_on(round_before)
        total = sum(worker.num_failures for worker in self.status.workers)
        assert total == 1, f"one death, and {total} charges: {before} {self.status.budgets}"

    def rank_dies_while_its_peer_waits(self) -> None:
        begun = self.round(0)
        (self.folder / "wait").touch()
        eventually((self.folder / "waits").exists, WITHIN_S)
        os.kill(self.worker("train", 1).pid, signal.SIGKILL)
        self.goes_on(begun[0])
        assert self.round(0)[2:] == begun[2:], "the healthy rank was started again"

    def master_dies(self) -> None:
        before, step = self.cluster.master_pid, self.step()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: self.cluster.master_pid != before, WITHIN_S)
        eventually(lambda: self.step() > step, WITHIN_S)

    def all_ranks_move(self) -> None:
        begun, step = self.round(0)[0], self.step()
        used = {self.worker("train", rank).node for rank in (0, 1)}
        self.handle.suspend()
        eventually(lambda: self.status.num_leaving == 0, WITHIN_S, "the workers did not end")
        for node in used:
            self.handle.connection.request(DrainNode(node=node))
        self.handle.resume()
        self.goes_on(begun)
        assert {self.worker("train", rank).node for rank in (0, 1)}.isdisjoint(used)
        assert self.round(0)[1] >= step, f"it went back to step {self.round(0)[1]} from {step} or later"
        for node in used:
            self.handle.connection.request(DrainNode(node=node, is_over=True))

    def node_dies(self) -> None:
        begun, node = self.round(0)[0], self.worker("train", 1).node
        self.cluster.kill_agent(int(node.removeprefix("node-")) - 1)
        self.goes_on(begun)

    def memory_is_bounded(self) -> None:
        """Count the buffers of all snapshot servers: three own ones and three copies of each rank, of each place."""
        buffers = 0
        for server in marked_processes(f"{MARKER_SNAPSHOTS}=1"):
            found = process.facts(server.pid)
            if found is not None and found.parent in self.cluster.agent_pids:
                links = [os.readlink(each) for each in Path(f"/proc/{server.pid}/fd").iterdir()]
                buffers += sum("memfd:unified-snapshot" in link for link in links)
        assert 0 < buffers <= NODES * 2 * 7, buffers

    def account(self) -> None:
        """A metric that is infinite is shown as one."""
        capture = subprocess.run(
            [sys.executable, "-m", "unified", "metrics", self.handle.job_id, "--master", self.cluster.address],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "inf" in capture.stdout, capture.stdout
        assert "nan" not in capture.stdout, capture.stdout

    def ends(self) -> None:
        (self.folder / "end").touch()
        assert self.handle.wait(timeout=WITHIN_S) == 0, self.status.reason
        for rank in range(2):
            found = json.loads((self.folder / f"trained-{rank}").read_text())
            assert found["rows"] == [found["epochs"]] * ROWS, "a row was lost, or trained twice"
            assert found["back"] == {"rank": rank, "rows": 10 * rank}, "a rank got the values of another rank"
            assert found["is_own"]
        story = self.handle.connection.ask(Explain(job=self.handle.job_id), Story)
        assert not [event for event in story.events if event.event == "job-restarts"], story

    # -- the night: the master's state ---------------------------------------------------------------------------------

    def state_is_lost(self) -> None:
        before = self.cluster.master_pid
        for file in (self.cluster.home / "master").glob("master.sqlite*"):
            file.unlink()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: self.cluster.master_pid != before, WITHIN_S)
        eventually(lambda: [node.state for node in self.cluster.nodes] == NODES * ["ALIVE"], WITHIN_S)
        kept = [self.keeper() for _ in range(2)]
        assert kept == 2 * ["restored None, 0 items"], "a job has what an earlier one of its name left"

    def keeper(self) -> str:
        builder: Any = DLJobBuilder().device_type("CPU").workload("keeper", "day_of_faults.keeper").resource(cpu=0.1)
        handle = self.cluster.submit(builder.build(), "kept")
        assert handle.wait(timeout=WITHIN_S) == 0
        return next(line.partition("] ")[2] for line in handle.logs() if "restored" in line)

    def log_is_damaged(self) -> None:
        log = self.cluster.home / "master/master.sqlite-wal"
        data = bytearray(log.read_bytes())
        data[len(data) // 2] ^= 1
        log.write_bytes(data)
        os.kill(self.cluster.master_pid, signal.SIGKILL)
        said = self.cluster.home / "master.log"
        eventually(lambda: "lacks the last" in said.read_text(), WITHIN_S, "the master began with what was left")


def test_a_day_of_faults(
    local_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    cluster = local_cluster(nodes=NODES, devices=2, restart_agents=50, restart_master=50)
    folder = tmp_path / "day"
    folder.mkdir()
    day = Day(cluster, folder)
    for act in (
        day.begins,
        day.odd_calls,
        day.queues_in_a_cycle,
        day.zygote_dies,
        day.rank_dies_while_its_peer_waits,
        day.master_dies,
        day.all_ranks_move,
        day.node_dies,
        day.memory_is_bounded,
        day.account,
        day.ends,
        day.state_is_lost,
        day.log_is_damaged,
    ):
        day.hour(act.__name__, act)
    with capsys.disabled():
        print()
        for name, seconds in day.hours:
            print(f"{name:32}{seconds:8.1f} s")
