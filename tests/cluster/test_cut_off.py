"""Three hosts, of which one is cut off for longer than its lease: no rank ever has two incarnations that train."""

import itertools
import re
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import lines
from tests.cluster.test_failure_table import documented
from tests.cluster.test_node_death import TICKING
from tests.support.hosts import Hosts
from unified import process
from unified.protocol.snapshots import LISTENER_NAME
from unified.testing import eventually

pytestmark = pytest.mark.netns

LEASE_S = 4.0
SUBMIT = """
import sys
from unified.client.submission import submit_job
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
folder, master = sys.argv[1:]
entry = EntryPoint(kind="attribute", target="entry_of_test", attribute="tick")
role = RoleSpec(name="w", kind="simple", entry_point=entry, total=2, resources=Resources(accelerator=1.0))
spec = JobSpec(name="ticking", roles=[role], node_num=3, device_per_node=1, accelerator_type="CPU", failover_exec=2,
               sys_path=[folder], working_dir=folder, stop_grace_s=1.0)
submit_job(spec, master=master).close()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    env = {"UNIFIED_LEASE_S": str(LEASE_S), "UNIFIED_HEARTBEAT_S": "0.5"}
    hosts = Hosts(tmp_path, 4, env, "--worker-entry", "light_worker:main")
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


def places(hosts: Hosts) -> dict[int, tuple[int, int]]:
    """Host and incarnation of each rank that runs."""
    workers = hosts.ask("status", "ticking")["workers"]
    return {
        worker["rank"]: (int(worker["node"][1:]), worker["incarnation"])
        for worker in workers
        if worker["state"] == "RUNNING"
    }


def spans(folder: Path) -> dict[str, list[tuple[float, float, str]]]:
    """First and last write of each incarnation, and its node, by rank and in their order."""
    written: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines(folder, "ticks"):
        rank, pid, node, at = line.split()
        written[rank][pid, node].append(float(at))
    return {
        rank: sorted((min(times), max(times), node) for (_, node), times in incarnations.items())
        for rank, incarnations in written.items()
    }


def no_two_at_once(folder: Path) -> None:
    for rank, incarnations in spans(folder).items():
        for old, new in itertools.pairwise(incarnations):
            assert old[1] < new[0], f"rank {rank}: an incarnation on {old[2]} wrote after the one on {new[2]} had begun"


def start(hosts: Hosts, folder: Path) -> dict[int, tuple[int, int]]:
    (folder / "entry_of_test.py").write_text(TICKING)
    eventually(lambda: list(hosts.nodes.values()) == ["ALIVE"] * 3, timeout=100, message="not all agents are there")
    hosts.run("-c", SUBMIT, str(folder), hosts.master)
    eventually(lambda: len(places(hosts)) == 2, timeout=100, message="the job does not run")
    return places(hosts)


def start_snapshots(hosts: Hosts, host: int) -> int:
    """Have the agent of a host start its snapshot server, as the first worker with a snapshot does; return its pid."""
    (listener,) = (hosts.folder / f"h{host}" / "run").glob(f"a-*/{LISTENER_NAME}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(listener))
        eventually(lambda: "event=snapshots-started" in hosts.log(host), message="nobody serves snapshots")
    return int(re.findall(r"event=snapshots-started pid=(\d+)", hosts.log(host))[0])


@pytest.mark.parametrize("is_agent_stopped", [False, True])
def test_a_host_that_is_cut_off_ends_its_ranks_before_others_begin_them(
    hosts: Hosts, tmp_path: Path, is_agent_stopped: bool
) -> None:
    before = start(hosts, tmp_path)
    victim = before[0][0]
    snapshots = start_snapshots(hosts, victim)
    agent = hosts.daemons[f"unified_agent-{victim}"]
    if is_agent_stopped:  # its keeper does it alone
        agent.send_signal(signal.SIGSTOP)
    hosts.cut(victim)
    eventually(
        lambda: places(hosts).get(0, (victim, 0))[0] != victim and len(places(hosts)) == 2,
        timeout=100,
        message="nobody replaces the rank",
    )
    if is_agent_stopped:
        assert agent.wait(100) == -signal.SIGKILL, "its keeper ends an agent that hangs"
        hosts.start_agent(victim)  # as a service manager would
    seen = len(lines(tmp_path, "ticks"))
    eventually(lambda: len(lines(tmp_path, "ticks")) > seen + 40, message="the replacement does not work")
    hosts.heal(victim)
    eventually(lambda: list(hosts.nodes.values()) == ["ALIVE"] * 3, timeout=100, message="the host does not come back")
    after, seen = places(hosts), len(lines(tmp_path, "ticks"))
    eventually(lambda: len(lines(tmp_path, "ticks")) > seen + 100, message="the workers do not go on")
    assert places(hosts) == after, "the return of the host disturbs nobody"
    no_two_at_once(tmp_path)
    charged = {use["limit"] for use in hosts.ask("status", "ticking")["budgets"]}
    assert charged == documented()["node-cut-off"]
    assert spans(tmp_path)["0"][0][2] == f"h{victim}"
    assert "event=lease-lost" in hosts.log(victim) or is_agent_stopped
    assert process.is_alive(snapshots) is not is_agent_stopped, "what it holds outlives the workers, and not the agent"


def test_a_short_cut_and_a_master_that_is_down_cost_no_worker(hosts: Hosts, tmp_path: Path) -> None:
    before = start(hosts, tmp_path)
    victim = before[0][0]
    hosts.cut(victim)
    time.sleep(LEASE_S / 2)
    hosts.heal(victim)
    time.sleep(LEASE_S)
    eventually(lambda: places(hosts) == before, timeout=100, message="a worker was started again")
    master = hosts.daemons["unified_master-0"]
    master.kill()
    master.wait()
    time.sleep(2 * LEASE_S)
    hosts.start(0, "unified_master", "--bind", hosts.master, "--state-dir", str(hosts.folder / "state"))
    eventually(lambda: list(hosts.nodes.values()) == ["ALIVE"] * 3, timeout=100, message="the agents are not back")
    eventually(lambda: places(hosts) == before, timeout=100, message="a worker was started again")
    no_two_at_once(tmp_path)


def test_a_master_whose_host_is_drained_comes_back_elsewhere_with_its_state(hosts: Hosts, tmp_path: Path) -> None:
    before = start(hosts, tmp_path)
    told = [(event["event"], event["reason"]) for event in hosts.ask("explain", "ticking")]
    master = hosts.daemons["unified_master-0"]
    master.send_signal(signal.SIGTERM)
    assert master.wait(100) == 0
    hosts.cut(0)  # the host is gone
    seen = len(lines(tmp_path, "ticks"))
    time.sleep(2 * LEASE_S)
    assert len(lines(tmp_path, "ticks")) > seen + 40, "nobody trains while the master is away"
    hosts.heal(0)  # its address is, with another host behind it
    hosts.run("-m", "unified_master", "--backup", str(tmp_path / "copy"), "--state-dir", str(tmp_path / "state"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "copy").rename(tmp_path / "elsewhere/master.sqlite")
    hosts.start(0, "unified_master", "--bind", hosts.master, "--state-dir", str(tmp_path / "elsewhere"))
    eventually(lambda: list(hosts.nodes.values()) == ["ALIVE"] * 3, timeout=100, message="the agents are not back")
    eventually(lambda: places(hosts) == before, timeout=100, message="a worker was started again")
    assert [(event["event"], event["reason"]) for event in hosts.ask("explain", "ticking")][: len(told)] == told
    assert all(len(incarnations) == 1 for incarnations in spans(tmp_path).values())
