"""The embedded cluster's supervision, with daemons that are stand-ins: started, watched, started again, ended."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.deadlines import missed
from unified import process
from unified.cli.main import main
from unified.client import embedded, submission
from unified.client.connection import MasterConnection
from unified.client.daemons import marked_processes
from unified.client.embedded import CLUSTER_VARIABLE, EmbeddedCluster
from unified.errors import ClusterError
from unified.job.spec import JobSpec
from unified.protocol.client_master import ListNodes, NodeList
from unified.testing import Belongings, eventually, left_behind

pytestmark = pytest.mark.processes

MASTER = """
import os, pathlib, signal, sys, time, zmq
from unified.process import die_with_parent
from unified.protocol.client_master import NodeList, NodeStatus, client_to_master, master_to_client
from unified.protocol.records import NodeResources, NodeState
die_with_parent(signal.SIGTERM, int(sys.argv[sys.argv.index("--die-with-parent") + 1]))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # no answer on its way may hold up the end
if os.environ.get("FAKE_MASTER") == "port-taken":
    print("unified-master: tcp://127.0.0.1:0 is taken", file=sys.stderr)
    sys.exit(1)
while os.environ.get("FAKE_MASTER") == "late" and not pathlib.Path(os.environ["PYTHONPATH"]).with_name("go").exists():
    time.sleep(0.02)
nothing = NodeResources(cpu=1, memory_mb=1, disk_mb=1)
router = zmq.Context().socket(zmq.ROUTER)
bind = sys.argv[sys.argv.index("--bind") + 1]
if bind.endswith(":0"):
    port = router.bind_to_random_port("tcp://127.0.0.1")
else:
    router.bind(bind)
    port = bind.rpartition(":")[2]
address_file = pathlib.Path(sys.argv[sys.argv.index("--address-file") + 1])
address_file.write_text(f"tcp://127.0.0.1:{port}\\n")
while True:
    if not router.poll(20):  # not for ever: a signal that comes just before is only noted, and wakes nobody
        continue
    sender, *frames = router.recv_multipart()
    names = [path.name for path in address_file.parent.glob("node-*") if path.suffix != ".log"]
    nodes = [NodeStatus(node=name, state=NodeState.ALIVE, hostname="", address="", resources=nothing, free=nothing)
             for name in names]
    request_id = client_to_master.decode(frames).request_id
    router.send_multipart([sender, *master_to_client.encode(NodeList(nodes=nodes), request_id)])
"""
AGENT = """
import json, os, pathlib, signal, subprocess, sys, time
from unified.process import die_with_parent
owner = "--early" if sys.argv[1] == "--early" else "--die-with-parent"
die_with_parent(signal.SIGTERM, int(sys.argv[sys.argv.index(owner) + 1]))
how = os.environ.get("FAKE_AGENT", "")
if how == "breaks":
    print("unified-agent: no such device", file=sys.stderr)
    sys.exit(3)
if sys.argv[1] == "--early":
    sys.argv += json.loads(sys.stdin.readline() or "[]")
    if "--state-dir" not in sys.argv:
        sys.exit("the driver has ended")
(pathlib.Path(os.environ["PYTHONPATH"]).parent / f"{sys.argv[3]}.flags").write_text(json.dumps(sys.argv))
state = pathlib.Path(sys.argv[sys.argv.index("--state-dir") + 1])
if how == "leaves":
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
stop = (lambda *_: (state / "asked").touch()) if how == "stubborn" else (lambda *_: sys.exit(0))
signal.signal(signal.SIGTERM, stop)
state.mkdir(exist_ok=True)
while True:
    time.sleep(0.02)
"""
DRIVER = """
import sys, signal
from pathlib import Path
from unified.client.embedded import EmbeddedCluster
cluster = EmbeddedCluster(2, 1, home=Path(sys.argv[1])).start()
print(cluster.cluster_id, flush=True)
if sys.argv[2] == "wait":
    signal.pause()
"""
BEGUN = """
import signal
from unified.client.embedded import EmbeddedCluster
print(EmbeddedCluster().begin().cluster_id, flush=True)
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder of sockets: a path of pytest's is too long."""
    folder = Path(tempfile.mkdtemp(prefix="u-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def stand_ins(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    (folder / "unified_master.py").write_text(MASTER)
    (folder / "unified_agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("UNIFIED_RUN_DIR", str(run_dir))
    monkeypatch.setenv("UNIFIED_HOME", str(tmp_path / "unified-home"))
    return tmp_path


def processes(cluster_id: str) -> list[str]:
    return [str(found) for found in marked_processes(f"{CLUSTER_VARIABLE}={cluster_id}")]


@pytest.mark.parametrize(
    "words",
    ["unified run --standalone hello.py", "unified up", "unified jobs --master tcp://127.0.0.1:1", "unified_master",
     "unified_agent --master tcp://127.0.0.1:1"],
)  # fmt: skip
def test_too_few_descriptors_are_one_sentence_and_exit_code_2(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hello.py").write_text("print(1)")
    for name in ("UNIFIED_HOME", "UNIFIED_RUN_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("UNIFIED_MASTER", raising=False)
    command = ["bash", "-c", f"ulimit -n 16 && exec {sys.executable} -m {words}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    program = words.split()[0].replace("_", "-")
    assert ended.stderr == f"{program}: `ulimit -n` is 16, which is too few open files: at least 64 are needed.\n"


def test_it_starts_answers_and_leaves_nothing(stand_ins: Path, run_dir: Path) -> None:
    before = Belongings()
    with EmbeddedCluster(2, 4) as cluster:
        assert cluster.address.startswith("tcp://127.0.0.1:")
        assert len(processes(cluster.cluster_id)) == 3
        assert process.is_alive(cluster.master_pid)
        assert cluster.home.parent == stand_ins / "unified-home" / "embedded"
        flags = json.loads(eventually((stand_ins / "node-2.flags").read_text, message="it has no flags"))
        assert flags[flags.index("--devices") + 1] == "4"
        assert flags[flags.index("--node-id") + 1] == "node-2"
        assert os.getsid(cluster.master_pid) != os.getsid(0)  # Ctrl-C at the terminal is for the driver
    cluster.stop()
    assert processes(cluster.cluster_id) == []
    assert cluster.left_behind == []
    assert list(run_dir.iterdir()) == []
    assert left_behind(before) == []


def test_it_begins_before_its_size_is_known(stand_ins: Path) -> None:
    cluster = EmbeddedCluster(home=stand_ins / "home").begin()
    eventually(lambda: len(processes(cluster.cluster_id)) == 2, message="master and first agent did not start")
    assert not (stand_ins / "node-1.flags").exists()
    cluster.set_nodes(2)
    cluster.devices_per_node = 4
    cluster.start()
    for name in ("node-1", "node-2"):
        flags = json.loads((stand_ins / f"{name}.flags").read_text())
        assert flags[flags.index("--devices") + 1] == "4"
    cluster.stop()
    assert processes(cluster.cluster_id) == []


@pytest.mark.parametrize("how", ["it is stopped", "its driver is killed"])
def test_one_that_was_begun_and_is_not_wanted_leaves_nothing(stand_ins: Path, how: str) -> None:
    code = BEGUN if how == "it is stopped" else f"{BEGUN}\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        cluster_id = driver.stdout.readline().strip()
        assert cluster_id
        if how != "it is stopped":
            driver.kill()
    eventually(lambda: not processes(cluster_id), timeout=100, message="the cluster outlived its driver")


def test_a_begun_cluster_is_taken_by_the_job_whose_environment_it_has(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def started(_: JobSpec, cluster: EmbeddedCluster | None) -> None:
        given.append(cluster)
        raise ClusterError("no further")

    monkeypatch.setattr(submission, "_started", started)
    monkeypatch.setattr(submission, "check_sendable", lambda spec: None)
    for change, is_taken in (("", True), ("set by the job's file", False)):
        cluster = EmbeddedCluster(home=stand_ins / "home")
        cluster.begin()
        submission.begun.append(cluster)
        if change:
            monkeypatch.setenv("MARK", change)
        with pytest.raises(ClusterError, match="no further"):
            submission.submit_job(JobSpec(name="j", roles=[]), master="local")
        assert (given.pop() is cluster) == is_taken
        if is_taken:
            eventually(partial(processes, cluster.cluster_id), timeout=100, message="it was not begun")
        else:
            assert processes(cluster.cluster_id) == []
        cluster.stop()
        assert cluster not in submission.begun


def test_a_begun_cluster_that_no_job_takes_ends_with_the_command(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[EmbeddedCluster] = []
    begin = EmbeddedCluster.begin

    def noted(cluster: EmbeddedCluster) -> EmbeddedCluster:
        begun.append(cluster)
        return begin(cluster)

    monkeypatch.setattr(EmbeddedCluster, "begin", noted)
    file = tmp_path / "job.py"
    for text in ("class Job:\n    def submit(self, name, blocking): return 5\njob = Job()\n", "raise SystemExit(5)\n"):
        file.write_text(text)
        assert main(["submit", str(file)]) == 5
        assert not any(cluster in submission.begun for cluster in begun)
        assert processes(begun[-1].cluster_id) == []
    assert len(begun) == 2


def test_an_agent_that_dies_is_started_again_until_it_has_died_too_often(stand_ins: Path) -> None:
    with EmbeddedCluster(1, 1, home=stand_ins / "home", max_agent_restarts=1) as cluster:
        (first,) = cluster.agent_pids
        os.kill(first, signal.SIGKILL)
        eventually(lambda: cluster.agent_pids != [first], message="the agent was not started again")
        assert cluster.problem is None
        os.kill(cluster.agent_pids[0], signal.SIGKILL)
        problem = eventually(lambda: cluster.problem, message="nothing was reported")
    assert "embedded agent node-1 ended 2 times; the last time it was killed by SIGKILL" in (problem or "")


def test_a_master_that_dies_is_reported_with_its_log(stand_ins: Path) -> None:
    with EmbeddedCluster(1, 1, home=stand_ins / "home") as cluster:
        os.kill(cluster.master_pid, signal.SIGKILL)
        problem = eventually(lambda: cluster.problem, message="nothing was reported")
    assert problem is not None
    assert problem.startswith("the embedded master was killed by SIGKILL")
    assert str(stand_ins / "home" / "master.log") in problem


def test_a_master_that_dies_is_started_again_until_it_has_died_too_often(stand_ins: Path) -> None:
    with EmbeddedCluster(1, 1, home=stand_ins / "home", max_master_restarts=1) as cluster:
        first, address = cluster.master_pid, cluster.address
        os.kill(first, signal.SIGKILL)
        eventually(lambda: cluster.master_pid != first, message="the master was not started again")
        with MasterConnection(address) as connection:
            assert len(connection.ask(ListNodes(), NodeList, timeout_s=100).nodes) == 1
        assert cluster.problem is None
        os.kill(cluster.master_pid, signal.SIGKILL)
        problem = eventually(lambda: cluster.problem, message="nothing was reported")
    assert problem is not None
    assert "ended 2 times (master_max_restart=1); the last time it was killed by SIGKILL" in problem


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FAKE_MASTER", "port-taken", r"the embedded master exited with code 1; .*\n    unified-master: .* is taken"),
        ("FAKE_AGENT", "breaks", r"agent node-1 ended 3 times; .*exited with code 3; .*\n.*no such device"),
    ],
)
def test_a_daemon_that_cannot_start_is_an_error_with_its_last_words(
    stand_ins: Path, variable: str, value: str, message: str
) -> None:
    before = Belongings()
    cluster = EmbeddedCluster(1, 1, home=stand_ins / "home", env={variable: value}, max_agent_restarts=2)
    with pytest.raises(ClusterError, match=message):
        cluster.start()
    assert processes(cluster.cluster_id) == []
    assert left_behind(before) == []


def test_a_slow_start_is_waited_for_and_told(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def let_go() -> None:
        eventually(lambda: len(caplog.messages) >= 3, message="nothing was said")
        (stand_ins / "go").touch()

    monkeypatch.setattr(embedded, "NOTE_S", 0.05)
    with pytest.raises(ClusterError, match=r"not ready after .* s: the master did not write its address; logs: "):
        EmbeddedCluster(1, 1, env={"FAKE_MASTER": "late"}).start(timeout_s=missed(0.2))
    caplog.clear()
    going = threading.Thread(target=let_go)
    going.start()
    with EmbeddedCluster(1, 1, home=stand_ins / "home", env={"FAKE_MASTER": "late"}):
        going.join()
    for message in caplog.messages:
        assert re.match(r"the cluster is not ready after \d\S* s: the master did not write its address; ", message)
        assert f"; logs: {stand_ins}/home. The start goes on while its processes live." in message


def is_handled(pid: int, number: int) -> bool:
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_slow_start(stand_ins: Path, number: int) -> None:
    (stand_ins / "hello.py").write_text("print(1)")
    command = [sys.executable, "-m", "unified", "run", "--standalone", "hello.py"]
    env = {**os.environ, "FAKE_MASTER": "late"}
    homes = stand_ins / "unified-home" / "embedded"
    with subprocess.Popen(command, cwd=stand_ins, env=env, stderr=subprocess.PIPE, text=True) as run:
        home = eventually(lambda: [*homes.glob("*/node-1.log")], message="no daemon was started")[0].parent
        eventually(lambda: len(processes(home.name)) == 2, message="not both daemons were started")
        eventually(lambda: is_handled(run.pid, signal.SIGTERM), message="the command takes no signals")
        run.send_signal(number)
        assert run.wait(100) == 128 + number
        assert run.stderr is not None
        assert "unified: ended by " in run.stderr.read()
    assert processes(home.name) == []


def test_a_home_that_cannot_be_made_is_an_error_of_ours(stand_ins: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"cannot be prepared: .*file/home"):
        EmbeddedCluster(home=tmp_path / "file" / "home").start()


def test_a_forked_child_of_the_driver_does_not_end_the_cluster(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedCluster() as cluster:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            cluster.stop()
        assert len(processes(cluster.cluster_id)) == 2
    assert processes(cluster.cluster_id) == []


@pytest.mark.parametrize("how", ["stubborn", "leaves"])
def test_what_does_not_end_is_killed_and_named(stand_ins: Path, how: str) -> None:
    cluster = EmbeddedCluster(1, 1, home=stand_ins / "home", env={"FAKE_AGENT": how}).start()
    cluster.stop(timeout_s=missed(0.2))
    assert processes(cluster.cluster_id) == []
    assert [left.split()[0] for left in cluster.left_behind] == (["process"] if how == "leaves" else [])


def test_ctrl_c_while_it_ends_has_all_killed_before_it_is_raised(stand_ins: Path, run_dir: Path) -> None:
    def interrupt() -> None:
        eventually((stand_ins / "home" / "node-1" / "asked").exists, message="the agent was not asked to end")
        os.kill(os.getpid(), signal.SIGINT)

    before = Belongings()
    cluster = EmbeddedCluster(1, 1, home=stand_ins / "home", env={"FAKE_AGENT": "stubborn"}).start()
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.stop(timeout_s=100)
    interrupter.join()
    assert processes(cluster.cluster_id) == []
    assert list(run_dir.iterdir()) == []
    assert left_behind(before) == []


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_the_end_of_the_driver_is_the_end_of_the_cluster(stand_ins: Path, end: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(stand_ins / "home"), "wait" if end == "kill" else "exit"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        cluster_id = driver.stdout.readline().strip()
        assert cluster_id
        if end == "kill":
            assert len(processes(cluster_id)) == 3
            driver.kill()
    assert driver.returncode == (-signal.SIGKILL if end == "kill" else 0)
    eventually(lambda: not processes(cluster_id), timeout=100, message="the cluster outlived its driver")


def test_the_run_folder_of_a_killed_driver_is_swept_by_the_next(stand_ins: Path, run_dir: Path) -> None:
    (run_dir / "e1-abc").mkdir(parents=True)
    (run_dir / "e1-abc" / "owner.lock").touch()
    (run_dir / "else").mkdir()
    with EmbeddedCluster(1, 1, home=stand_ins / "home"):
        assert not (run_dir / "e1-abc").exists()
        assert (run_dir / "else").exists()


def test_the_newest_ten_homes_are_kept(stand_ins: Path) -> None:
    folder = stand_ins / "unified-home" / "embedded"
    for number in range(15):
        (folder / f"20250101-0000{number:02}-1-abc").mkdir(parents=True)
    with EmbeddedCluster(1, 1) as cluster:
        kept = sorted(path.name for path in folder.iterdir())
    assert len(kept) == 10
    assert kept[-1] == cluster.cluster_id
    assert kept[0] == "20250101-000006-1-abc"


@pytest.mark.parametrize(
    ("daemon", "flags"),
    [("unified_master", ["--bind", "tcp://127.0.0.1:0"]), ("unified_agent", ["--master", "tcp://127.0.0.1:1"])],
)
def test_a_daemon_whose_driver_died_before_it_looked_ends(tmp_path: Path, daemon: str, flags: list[str]) -> None:
    with subprocess.Popen(["true"]) as driver:
        pass
    command = [sys.executable, "-m", daemon, *flags, "--state-dir", str(tmp_path), "--die-with-parent"]
    done = subprocess.run([*command, str(driver.pid)], capture_output=True, check=False, timeout=100)
    assert done.returncode == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
