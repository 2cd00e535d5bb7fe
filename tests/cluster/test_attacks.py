"""Attacks on real daemons: hostile workers, hostile clients and an unkind host, each with a bounded load.

Whatever they do, the daemons live, the next client is served, nothing that they say forges a line or reaches a
terminal, and nothing is left. The last ones are in network namespaces: who can reach the sockets of a job of several
hosts.
"""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from tests.cluster.conftest import Cluster, Project
from tests.support.hosts import Hosts
from unified.api.builder import DLJobBuilder
from unified.client.connection import MasterConnection
from unified.client.handle import JobHandle
from unified.errors import JobError, RefusedError
from unified.protocol.client_master import GetDirectory, GetJob, ListJobs, ReadLog, StopJob, client_to_master
from unified.protocol.framing import PROTOCOL_VERSION
from unified.testing import Belongings, LocalCluster, eventually, left_behind

pytestmark = pytest.mark.processes

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\u202egpj.exe\r\n2026-01-01 00:00:00,000 master INFO event=forged\x9b1m"
WORKERS = f"""
import os, struct, subprocess, sys, time
from pathlib import Path
from unified import current_worker
from unified.protocol.records import MAX_POINTS, Failure, Progress, WorkerReport
from unified.protocol.worker_agent import Failed, Reported

HOSTILE = {HOSTILE!r}

def send():
    return current_worker()._reporter._send

def exit_text():
    sys.exit(HOSTILE)

def exit_number():
    sys.exit(10**20)

def raises():
    raise ValueError(HOSTILE + chr(0xd800))

def many_metrics():
    send()(Reported(progress=Progress(metrics={{str(index): 1 for index in range(20_000)}})))
    current_worker().report(step=1)
    import signal; signal.pause()

def long_metrics():
    send()(Reported(progress=Progress(metrics={{"n" * 1_000_000: 1}})))
    import signal; signal.pause()

def point(number, **metrics):
    return WorkerReport(at=1.0, step=number, total=None, metrics=metrics, number=number)

def many_points():
    send()(Reported(progress=Progress(step=1), points=[point(0)] * (MAX_POINTS + 1)))
    import signal; signal.pause()

def flood():
    for start in range(0, 60_000, 1000):
        points = [point(number, text="x" * 200, **{{str(index): "y" * 200 for index in range(4)}})
                  for number in range(start, start + 1000)]
        send()(Reported(progress=Progress(step=start), points=points))

def channel():
    return send().__self__

def no_message():
    channel()._socket.sendall(struct.pack("<I", 2**32 - 1) + b"x" * 100)
    import signal; signal.pause()

def long_failure():
    channel().send(Failed(failure=Failure(summary=HOSTILE * 100_000, traceback="x\\n" * 1_000_000)))
    sys.exit(1)

def metric_names():
    current_worker().report(step=1, **{{HOSTILE: HOSTILE}})

def no_step():
    current_worker().report(step=2**70)

def leaves_processes():
    for environment in (None, {{}}):
        one = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env=environment)
        print(one.pid, file=open(Path(__file__).with_name("left"), "a"))
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print(os.getpid(), file=open(Path(__file__).with_name("left"), "a"))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while Path(__file__).with_name("left").read_text().count("\\n") < 3:
        time.sleep(0.02)
    os._exit(3)

def friendly():
    print("hello")
"""
FAILING = (
    "exit_text",
    "exit_number",
    "raises",
    "many_metrics",
    "long_metrics",
    "many_points",
    "no_message",
    "long_failure",
    "no_step",
    "leaves_processes",
)
ENDING = ("metric_names", "flood", "friendly")


def job(name: str) -> Any:
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    return builder.workload("w", f"hostile_workers.{name}").total(1).resource(cpu=0.01).max_restart(0).build()


def told(cluster: LocalCluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unified", *words, "--master", cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def daemons(cluster: LocalCluster) -> list[int]:
    return [cluster.master_pid, *cluster.agent_pids]


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_hostile_workers_hurt_nobody_but_their_own_jobs(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(hostile_workers=WORKERS)
    cluster = local_cluster(nodes=1, devices=1)
    before, connected = daemons(cluster), Belongings()
    handles = {name: cluster.submit(job(name), name) for name in (*FAILING, *ENDING)}
    codes = {name: handle.wait(timeout=200) for name, handle in handles.items()}
    assert codes == {**dict.fromkeys(FAILING, 1), **dict.fromkeys(ENDING, 0)}
    assert left_behind(connected) == [], "handles keep threads or descriptors"
    for name, handle in handles.items():
        for command in ("status", "explain"):
            shown = told(cluster, command, handle.job_id)
            assert shown.returncode == 0, shown.stderr
            assert is_plain(shown.stdout), (name, shown.stdout)
            assert "\n2026-01-01 00:00:00,000 master INFO event=forged" not in shown.stdout
            assert len(shown.stdout) < 20_000, name
        assert len(told(cluster, "status", handle.job_id, "--json").stdout) < 100_000, name
    failures = {name: handle.status().end for name, handle in handles.items()}
    assert failures["exit_number"] is not None
    assert failures["exit_number"].failure.exit_code == 255
    left = [int(pid) for pid in (tmp_path / "project/left").read_text().split()]
    assert len(left) == 3
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in left), 100, "processes of a worker outlive it")
    assert failures["no_step"] is not None
    assert str(2**70) in failures["no_step"].failure.summary
    for name in ("many_metrics", "long_metrics", "many_points", "no_message"):
        end = failures[name]
        assert end is not None
        assert "its agent killed it: it sent an unreadable message" in end.failure.summary
    assert told(cluster, "jobs").stdout.count("\n") == len(handles) + 1
    assert r"\x1b]0;owned\x07" in told(cluster, "status", handles["metric_names"].job_id).stdout
    series = list(cluster.home.rglob("0.metrics.jsonl*"))
    assert 20 << 20 < sum(file.stat().st_size for file in series) < 40 << 20, "of 60 MiB old points are thinned"
    shown = json.loads(told(cluster, "metrics", "flood", "w-0", "--json").stdout)["w-0"]
    assert shown["num_thinned"] > 0
    assert shown["reports"][0]["number"] == 0
    assert shown["reports"][-1]["number"] == 59_999
    for log in cluster.home.glob("*.log"):
        assert is_plain(log.read_text()), log
        assert not re.search(r"^2026-01-01 00:00:00,000 master", log.read_text(), re.MULTILINE)
    assert daemons(cluster) == before


@pytest.mark.usefixtures("without_torch")
def test_hostile_clients_do_not_keep_the_master_from_the_next(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(hostile_workers=WORKERS)
    cluster = local_cluster(nodes=1, devices=1)
    before = daemons(cluster)
    host, _, port = cluster.address.removeprefix("tcp://").partition(":")
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(16 + 32)
    open_sockets = []
    for index in range(60):  # rubbish, half a handshake, nothing at all, a frame that announces 8 EiB
        raw = socket.create_connection((host, int(port)), timeout=100)
        raw.sendall((b"GET / HTTP/1.1\r\n\r\n", greeting[:20], b"", greeting + b"\x02" + b"\x7f" * 8)[index % 4])
        open_sockets.append(raw)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(cluster.address)
    body = client_to_master.encode_body(ListJobs())
    for frames in (
        [b""],
        [os.urandom(200)] * 3,
        [client_to_master.encode_header(1), b"\xc1" * 100],
        [client_to_master.encode_header(1), b"\x91" * 20_000],  # nested without end
        [client_to_master.encode_header(1), b"\xdd\xff\xff\xff\xff"],  # an array of 4 G values
        client_to_master.encode(ListJobs(), 1, version=PROTOCOL_VERSION + 7),
        [b"\x92\x02\xcf" + b"\xff" * 8, body],
    ):
        for _ in range(20):
            dealer.send_multipart(frames)
    with MasterConnection(cluster.address) as connection:
        for request in (
            StopJob(job=HOSTILE),
            GetJob(job=HOSTILE * 1000),
            GetDirectory(job="../../etc/passwd"),
            ReadLog(job=HOSTILE, worker=HOSTILE, incarnation=-5, stream="out", offset=-(2**62), max_bytes=2**62),
        ):
            with pytest.raises(RefusedError):
                connection.request(request)
        handle = cluster.submit(job("friendly"), "friendly")
        assert handle.wait(timeout=200) == 0
    shown = told(cluster, "status", HOSTILE)
    assert shown.returncode == 2
    assert is_plain(shown.stderr)
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(odd)
    command = [sys.executable, "-m", "unified", "run", "--master", cluster.address, "train.py"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=odd, check=False)
    assert refused.returncode == 2
    assert "JobSpec.working_dir is" in refused.stderr
    for words in (("explain", "friendly", "--limit"), ("logs", "friendly", "--tail")):
        assert told(cluster, *words, "9" * 20).returncode == 2
    for wrong in ("--nnodes=0", "--nnodes=3:1", "--max-restarts=-2", "--env==1"):
        refused = subprocess.run(
            [sys.executable, "-m", "unified", "run", "--master", cluster.address, wrong, "train.py"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    for env in ({"A": "\0"}, {"": "1"}, {"A=B": "1"}, {"A": "\ud800"}):
        described: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
        with pytest.raises(JobError):
            described.workload("w", "hostile_workers.friendly").total(1).env(env).build()
    for raw in open_sockets:
        raw.close()
    dealer.close()
    context.term()
    assert is_plain((cluster.home / "master.log").read_text())
    assert daemons(cluster) == before


@pytest.mark.usefixtures("without_torch")
def test_folders_are_private_whatever_the_umask_and_no_link_leads_a_daemon_elsewhere(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(hostile_workers=WORKERS)
    umask = os.umask(0)
    try:
        cluster = local_cluster(nodes=1, devices=1)
        assert cluster.submit(job("friendly"), "friendly").wait(timeout=100) == 0
    finally:
        os.umask(umask)
    folders = [cluster.home, cluster.home / "node-1", *(cluster.home / "node-1/logs").rglob("**/")]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    outputs = [path for path in (cluster.home / "node-1/logs").rglob("*") if path.suffix in (".out", ".err", ".jsonl")]
    assert outputs
    assert {stat.S_IMODE(path.stat().st_mode) for path in outputs} == {0o600}
    victim = tmp_path / "victim"
    victim.mkdir()
    victim.chmod(0o755)
    (tmp_path / "run").symlink_to(victim)
    agent = subprocess.run(
        [sys.executable, "-m", "unified_agent", "--master", cluster.address, "--node-id", "led"],
        env={**os.environ, "UNIFIED_RUN_DIR": str(tmp_path / "run"), "UNIFIED_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert agent.returncode == 1
    assert "is a symbolic link, which is not followed" in agent.stderr
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755
    assert list(victim.iterdir()) == []


RANKS = """
import time
from pathlib import Path

def run():
    import torch
    import torch.distributed as dist
    from unified import current_worker

    total = torch.ones(1)
    dist.all_reduce(total)
    folder = Path(__file__).parent
    (folder / f"{current_worker().job_info.name}-{dist.get_rank()}").write_text(f"{total.item():g}")
    while not (folder / "go").exists():
        time.sleep(0.02)
"""
SUBMIT = """
import sys
from unified.client.submission import submit_job
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
folder, master, name, nodes = sys.argv[1:]
entry = EntryPoint(kind="attribute", target="attacked_ranks", attribute="run")
needs = Resources(accelerator=1.0) if int(nodes) > 1 else Resources()
role = RoleSpec(name="w", kind="elastic", entry_point=entry, total=2, resources=needs)
spec = JobSpec(name=name, roles=[role], node_num=int(nodes), device_per_node=1, accelerator_type="CPU",
               sys_path=[folder], working_dir=folder, stop_grace_s=1.0)
submit_job(spec, master=master).close()
"""
LISTENERS = """
import json, psutil
found = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN and each.pid]
print(json.dumps([[each.laddr.ip, each.laddr.port, psutil.Process(each.pid).name()] for each in found]))
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20).close()
    print("open")
except ConnectionRefusedError:
    print("refused")
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, 3)
    try:
        hosts.open()
        for number in range(3):  # another network of each host, which the cluster has nothing to do with
            name = hosts.namespace(number)
            hosts.ip(
                "-n",
                name,
                "address",
                "add",
                f"{hosts.subnet.replace('10.79', '10.80')}.{10 + number}/24",
                "dev",
                "eth0",
            )
        yield hosts
    finally:
        hosts.close()


def asked(hosts: Hosts, number: int, program: str, *words: str) -> str:
    command = [*hosts._command(number), "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.strip()


@pytest.mark.netns
def test_the_sockets_of_a_job_listen_at_the_cluster_s_addresses_alone(hosts: Hosts, tmp_path: Path) -> None:
    """Ranks on two hosts meet in a store that another network of the same host does not reach, and ranks of one host
    in one that no other host reaches."""
    (tmp_path / "attacked_ranks.py").write_text(RANKS)
    eventually(lambda: list(hosts.nodes.values()) == ["ALIVE"] * 2, timeout=100, message="not all agents are there")
    for name, nodes in (("far", "2"), ("near", "1")):
        hosts.run("-c", SUBMIT, str(tmp_path), hosts.master, name, nodes)
    met = [tmp_path / f"{name}-{rank}" for name in ("far", "near") for rank in range(2)]
    eventually(lambda: all(path.exists() and path.read_text() == "2" for path in met), 120, "the ranks do not meet")
    assert len({worker["node"] for worker in hosts.ask("status", "far")["workers"]}) == 2
    near_on = hosts.ask("status", "near")["workers"][0]["node"]
    stores: dict[str, list[tuple[str, int]]] = {}
    for number in (1, 2):
        listeners = json.loads(asked(hosts, number, LISTENERS))
        own = f"{hosts.subnet}.{10 + number}"
        assert {ip for ip, _, _ in listeners} <= {own, "127.0.0.1"}, listeners
        stores[f"h{number}"] = [(ip, port) for ip, port, process in listeners if process == "unified-store"]
    every = [each for found in stores.values() for each in found]
    assert sorted(ip == "127.0.0.1" for ip, _ in every) == [False, False, True, True], "two of each job"
    assert {ip for ip, _ in stores[near_on]} >= {"127.0.0.1"}
    for node, found in stores.items():
        number = int(node[1:])
        own, other = f"{hosts.subnet}.{10 + number}", f"{hosts.subnet.replace('10.79', '10.80')}.{10 + number}"
        for ip, port in found:
            reached = [asked(hosts, 3 - number, CONNECT, address, str(port)) for address in (own, other)]
            assert reached == (["refused", "refused"] if ip == "127.0.0.1" else ["open", "refused"])
    (tmp_path / "go").touch()
    for name in ("far", "near"):
        eventually(lambda name=name: hosts.ask("status", name)["exit_code"] == 0, 100, "it does not end")  # type: ignore[misc]


@pytest.mark.slow
def test_every_socket_of_a_job_on_one_host_is_on_loopback_and_ours_are_in_the_range(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(attacked_ranks=RANKS)
    cluster = local_cluster(nodes=1, devices=2, env={"UNIFIED_PORT_RANGE": "25000-25199"})
    subprocess.run([sys.executable, "-c", SUBMIT, str(tmp_path / "project"), cluster.address, "near", "1"], check=True)
    met = [tmp_path / f"project/near-{rank}" for rank in range(2)]
    eventually(lambda: all(path.exists() for path in met), 100, "the ranks do not meet")
    found = {}
    for process in cluster.processes():
        pid = int(process.split()[0])
        for each in psutil.Process(pid).net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                found[each.laddr.port] = (each.laddr.ip, psutil.Process(pid).name())
    assert {ip for ip, _ in found.values()} == {"127.0.0.1"}, found
    in_range = Counter(name.split()[0] for port, (_, name) in found.items() if 25000 <= port < 25200)
    outside = {name.split()[0] for port, (_, name) in found.items() if not 25000 <= port < 25200}
    assert in_range["unified-store"] == in_range["unified-master"] == 2, found  # control and relay
    assert sum(in_range.values()) == 2 + 2 + 1 + 2, "the agent's for snapshots, and an inbox of each rank"
    assert not any(name.startswith("unified-") for name in outside), "the others are Gloo's"
    (tmp_path / "project/go").touch()
    assert JobHandle(cluster.connection, "near").wait(timeout=100) == 0
