"""One job on one real cluster through a day of faults, one after another; at the end no row was lost or trained twice.

The cluster starts slowly, and all that it writes is on one small disk. While the job trains, other jobs run beside it.
In the night the master begins anew with no state, then with a damaged log, and at last a stranger listens at its
address. A table of the hours is printed at the end. The only mock is the node of 5 000 workers: its agent is the
stand-in of benchmarks/bus/scale_load.py.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from benchmarks.bus import scale
from tests.cluster.conftest import PROGRAMS, Cluster, Project
from tests.cluster.test_page_snippets import job_of_snippets
from tests.io.agent.test_stranger_at_master import http
from tests.support.full_disk import MountDisk, SmallDisk
from tests.support.gateway_process import TOKEN, StartGateway, start_gateway  # noqa: F401 - a fixture
from tests.support.page import browser, stream
from unified import process
from unified.api.builder import DLJob, DLJobBuilder
from unified.client.daemons import marked_processes
from unified.client.handle import JobHandle
from unified.client.report import state_lines
from unified.errors import UnifiedError
from unified.protocol.client_master import DrainNode, Explain, JobStatus, Story
from unified.protocol.records import Stage, TimeSpent, WorkerState
from unified.testing import LocalCluster, eventually
from unified_agent.spawn import MARKER_SNAPSHOTS

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN_S = 200.0
NODES = 4
ROWS = 24
MANY = 5000
ANSWER_CPU_S = 4.0
"""Most CPU that the master may use from one answer to the next. Placing `MANY` workers on a node once took it 9 s."""
SLOW_START_S = 40.0
CLOCK_BACK_S = 5000.0
SITE = f"""
import os, sys, time
if "unified_master" in sys.orig_argv:
    folder = os.environ["DAY"]
    if os.path.exists(folder + "/slow"):
        os.unlink(folder + "/slow")
        time.sleep({SLOW_START_S})
    if os.path.exists(folder + "/old-clock"):
        def time_ns(real=time.time_ns): return real() - int({CLOCK_BACK_S} * 1e9)
        time.time_ns, time.time = time_ns, lambda: time_ns() / 1e9
"""
"""A `sitecustomize` of the master: a slow disk at its first start, and an older clock while a file is there."""

SHARED_CODE = """
import contextlib, pathlib
TEXT = "as it was shipped"
def work():
    print("found", TEXT, flush=True)
    file = pathlib.Path(__file__)
    with contextlib.suppress(PermissionError):
        file.write_text(file.read_text().replace(TEXT, "of another job"))
"""


def small_job(function: str, number: int = 1, **resources: Any) -> DLJob:
    builder: Any = DLJobBuilder().device_type("CPU")
    job: DLJob = builder.workload("w", function).total(number).resource(**(resources or {"cpu": 0.1})).build()
    return job


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
    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        disk: SmallDisk,
        project: Project,
        start_gateway: StartGateway,  # noqa: F811
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        self.disk = disk
        self.project = project
        self.start_gateway = start_gateway
        self.hours: list[tuple[str, float]] = []
        self.stays = 0
        """Pid of a worker of the night."""
        self.handle: JobHandle = cluster.submit(a_day(folder), "day", restart_backoff=0.0)

    def hour(self, name: str, act: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            act()
        except BaseException as error:
            error.add_note(f"in the hour {name!r}, after {[done for done, _ in self.hours]}")
            with contextlib.suppress(UnifiedError):  # the master may have ended
                error.add_note("\n".join(list(self.handle.logs())[-40:]))
                error.add_note(
                    "\n".join(f"{event.at:.3f} {event.event}: {event.reason}" for event in self.story.events)
                )
            raise
        self.hours.append((name, time.monotonic() - begun))

    @property
    def status(self) -> JobStatus:
        return self.cluster.status(self.handle.job_id)

    def output(self, handle: JobHandle) -> list[str]:
        """Wait until a job has ended well; return what it printed."""
        assert handle.wait(timeout=WITHIN_S) == 0, handle.status().reason
        return [line.partition("] ")[2] for line in handle.logs()]

    @property
    def story(self) -> Story:
        return self.handle.connection.ask(Explain(job=self.handle.job_id), Story)

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

    def master_dies_and_its_clock_is_old(self) -> None:
        before, step = self.cluster.master_pid, self.step()
        (self.folder / "old-clock").touch()
        os.kill(before, signal.SIGKILL)
        eventually(lambda: self.cluster.master_pid != before, WITHIN_S)
        eventually(lambda: self.step() > step, WITHIN_S)
        (self.folder / "old-clock").unlink()

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

    def code_of_another_job(self) -> None:
        folder = self.folder / "shipped"
        folder.mkdir()
        (folder / "shared_code.py").write_text(SHARED_CODE)
        for _ in range(2):
            handle = self.cluster.submit(small_job("shared_code.work"), "ships", ship=str(folder))
            assert self.output(handle) == ["found as it was shipped"]

    def code_of_the_page(self) -> None:
        self.output(self.cluster.submit(job_of_snippets(self.folder, self.project), "snippets"))

    def disk_is_full(self) -> None:
        """The reserve is a 16th of the disk."""
        step = self.step()
        self.disk.fill(leave=32 << 20)
        handle = self.cluster.submit(small_job("day_of_faults.printer"), "prints")
        self.output(handle)
        lost = handle.status().workers[0].output_lost
        assert "except for state" in lost, lost
        assert str(self.cluster.home) in lost
        assert self.disk.free > 8 << 20
        eventually(lambda: self.step() > step, WITHIN_S, "the training stands")
        self.disk.make_room()

    def stalls(self) -> None:
        """The account of time is one for the status and for the page."""
        (self.folder / "stall").touch()

        def stalled_s(times: TimeSpent | None) -> float:
            assert times is not None
            return times.at(time.time()).get("stalled", 0.0)

        eventually(lambda: stalled_s(self.status.times) > 5, WITHIN_S, "no stall is counted")
        shown = self.start_gateway("--master", self.cluster.address)
        with browser(shown.url, TOKEN) as client, stream(client) as events:
            row = next(row for row in next(events).data["jobs"] if row["job_id"] == self.handle.job_id)
        assert stalled_s(msgspec.convert(row["times"], TimeSpent)) > 5
        assert any(" % stalled" in line for line in self.command("status").splitlines())
        (self.folder / "stall").unlink()
        step = self.step()
        eventually(lambda: self.step() > step, WITHIN_S)

    def command(self, name: str) -> str:
        """Return what a command says of the job."""
        words = [sys.executable, "-m", "unified", name, self.handle.job_id, "--master", self.cluster.address]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def infinite_metrics(self) -> None:
        """A metric that is infinite is shown as one."""
        said = self.command("metrics")
        assert "inf" in said, said
        assert "nan" not in said, said

    def ends(self) -> None:
        (self.folder / "end").touch()
        assert self.handle.wait(timeout=WITHIN_S) == 0, self.status.reason
        for rank in range(2):
            found = json.loads((self.folder / f"trained-{rank}").read_text())
            assert found["rows"] == [found["epochs"]] * ROWS, "a row was lost, or trained twice"
            assert found["back"] == {"rank": rank, "rows": 10 * rank}, "a rank got the values of another rank"
            assert found["is_own"]
        events = self.story.events
        assert not [event for event in events if event.event == "job-restarts"]
        times = [event.at for event in events]
        assert times == sorted(times)
        status, lasted_s = self.status, sum(seconds for _, seconds in self.hours)
        assert status.ended_at is not None
        # While a master whose clock is old is away, its time stands.
        assert lasted_s / 2 < status.ended_at - status.submitted_at < lasted_s + WITHIN_S

    def many_workers_on_a_node(self) -> None:
        """While a node is given 5 000 workers, the master answers."""
        master = psutil.Process(self.cluster.master_pid)
        longest_s, last = 0.0, sum(master.cpu_times()[:2])
        with scale.load(self.cluster.address, 1, MANY) as (told, _):
            eventually(lambda: told().get("register_s"), WITHIN_S)
            handle = self.cluster.submit(small_job("day_of_faults.stays", MANY, user_defined={"sim": 1}), "many")
            end_at = time.monotonic() + WITHIN_S
            while told()["running"] < MANY:
                assert time.monotonic() < end_at, told()
                self.cluster.nodes  # noqa: B018 - a question
                used = sum(master.cpu_times()[:2])
                longest_s, last = max(longest_s, used - last), used
                time.sleep(0.02)
            handle.stop()
            eventually(lambda: handle.status().num_leaving == 0, WITHIN_S)
        assert 0 < longest_s < ANSWER_CPU_S

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
        [line] = self.output(self.cluster.submit(small_job("day_of_faults.keeper"), "kept"))
        return line

    def log_is_damaged(self) -> None:
        handle = self.cluster.submit(small_job("day_of_faults.stays"), "stays")
        eventually(lambda: handle.status().stage is Stage.RUNNING, WITHIN_S)
        self.stays = handle.status().workers[0].pid
        log = self.cluster.home / "master/master.sqlite-wal"
        data = bytearray(log.read_bytes())
        data[len(data) // 2] ^= 1
        log.write_bytes(data)
        os.kill(self.cluster.master_pid, signal.SIGKILL)
        said = self.cluster.home / "master.log"
        eventually(lambda: "lacks the last" in said.read_text(), WITHIN_S, "the master began with what was left")

    def a_stranger_listens(self) -> None:
        """Workers end with their lease. `log_is_damaged` has left no master."""
        assert process.is_alive(self.stays)
        with http(self.cluster.address):
            eventually(lambda: not process.is_alive(self.stays), WITHIN_S, "a worker outlives its lease")


def test_a_day_of_faults(
    small_disk: MountDisk,
    local_cluster: Cluster,
    project: Project,
    start_gateway: StartGateway,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project(day_of_faults=(PROGRAMS / "day_of_faults.py").read_text())
    folder = tmp_path / "day"
    (folder / "site").mkdir(parents=True)
    (folder / "site/sitecustomize.py").write_text(SITE)
    (folder / "slow").touch()
    disk = small_disk(tmp_path / "home", mebibytes=256)
    env = {"PYTHONPATH": str(folder / "site"), "DAY": str(folder), "UNIFIED_LEASE_S": "8"}
    begun = time.monotonic()
    cluster = local_cluster(NODES, 2, home=tmp_path / "home", restart_agents=50, restart_master=50, env=env)
    started_s = time.monotonic() - begun
    assert started_s > SLOW_START_S
    day = Day(cluster, folder, disk, project, start_gateway)
    for act in (
        day.begins,
        day.odd_calls,
        day.queues_in_a_cycle,
        day.zygote_dies,
        day.rank_dies_while_its_peer_waits,
        day.master_dies_and_its_clock_is_old,
        day.all_ranks_move,
        day.node_dies,
        day.memory_is_bounded,
        day.code_of_another_job,
        day.code_of_the_page,
        day.disk_is_full,
        day.stalls,
        day.infinite_metrics,
        day.ends,
        day.many_workers_on_a_node,
        day.state_is_lost,
        day.log_is_damaged,
        day.a_stranger_listens,
    ):
        day.hour(act.__name__, act)
    with capsys.disabled():
        print()
        for name, seconds in [("starts", started_s), *day.hours]:
            print(f"{name:36}{seconds:8.1f} s")
