"""Jobs on pods that are started as their manifests say: pods end and come back elsewhere, and the job ends well.

There is no API server: tests/support/kubelet.py plays what a kubelet does, and the test is the controllers.
"""

import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubelet import ROOT, WITHIN_S, Kubelet, Pod
from tests.support.manifests import read, schema_faults
from unified.kubernetes import render
from unified.kubernetes.options import ClusterOptions, PodOptions, RunOptions
from unified.security.curve import new_key
from unified.security.keys import write_key
from unified.testing import eventually

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900)]

JOB = """
from unified.api.builder import DLJobBuilder
def build():
    builder = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU")
    return builder.train("net.train").nnodes(2).nproc_per_node(1).build()
"""
CODE = """
import json, os, socket, time
from pathlib import Path
import torch
import torch.distributed as dist
from unified import rpc
from unified.elastic import ElasticState, elastic

OUT = Path("/out")

@rpc()
def where():
    return socket.gethostname()

def tell(**fields):
    with (OUT / "steps").open("a") as file:
        print(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **fields}), file=file, flush=True)

def save(model, step):
    torch.save({"model": model.state_dict(), "step": step}, OUT / "draft")
    (OUT / "draft").rename(OUT / "saved")

def train():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)

    def restore():
        if not (OUT / "saved").exists():
            return None
        saved = torch.load(OUT / "saved")
        model.load_state_dict(saved["model"])
        return saved["step"]

    state = ElasticState(restore=restore, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    @elastic(state)
    def loop():
        is_over = False
        while not is_over:
            end = torch.tensor([float((OUT / "end").exists())])
            dist.all_reduce(end)
            is_over = end.item() > 0
            state.optimizer.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            state.optimizer.step()
            tell(rank=dist.get_rank(), step=state.step + 1)
            if dist.get_rank() == 0:
                save(model, state.step + 1)
            state.commit()
            time.sleep(0.1)
    loop()
"""
COUNT = """
import json, os, socket, time
from pathlib import Path

def train():
    for step in range(1, 10_000):
        with Path("/out/steps").open("a") as file:
            print(json.dumps({"host": socket.gethostname(), "rank": int(os.environ["RANK"]), "step": step}), file=file)
        if Path("/out/end").exists():
            break
        time.sleep(0.1)
"""
KILL_MASTER = 'for each in /proc/[0-9]*; do test "$(cat $each/comm)" != unified-master || kill -9 ${each#/proc/}; done'
SMALL: dict[str, Any] = {"claim": {"out": "/out"}, "cpus": "1", "memory": "2Gi", "shm": "256Mi", "grace": 30}
MASTER = "tcp://unified-master:7077"
Open = Callable[..., Kubelet]


@pytest.fixture
def open_kubelet(tmp_path: Path) -> Iterator[Open]:
    opened: list[Kubelet] = []

    def start(objects: list[render.Object], options: PodOptions) -> Kubelet:
        workspace, key = tmp_path / "workspace", tmp_path / "cluster.key"
        workspace.mkdir()
        workspace.chmod(0o755)
        (workspace / "job.py").write_text(JOB)
        (workspace / "net.py").write_text(CODE)
        write_key(key, new_key())
        (tmp_path / "token").write_text("t" * 48)
        secrets = {("unified-key", "cluster.key"): key, ("unified-gateway", "token"): tmp_path / "token"}
        kubelet = Kubelet(tmp_path, render.to_yaml(objects, options), secrets, workspace)
        opened.append(kubelet)
        kubelet.open()
        return kubelet

    yield start
    for kubelet in opened:
        kubelet.close()


class Steps:
    """Lines of the ranks, in a volume that all pods share."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "claim-out"

    def all(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.folder / "steps").read_text().splitlines()]
        except (FileNotFoundError, ValueError):
            return []

    def await_more(self, *running: Pod, count: int = 10) -> list[dict[str, Any]]:
        """Both ranks go on by some steps; what they tell of these."""
        before = len(self.all())

        def go_on() -> bool:
            new = self.all()[before:]
            assert not any(pod.has_ended for pod in running)
            return all(sum(each["rank"] == rank for each in new) >= count for rank in (0, 1))

        try:
            eventually(go_on, timeout=WITHIN_S)
        except AssertionError as error:
            logs = "\n".join(f"--- {pod.name}\n{pod.log[-4000:]}" for pod in running)
            raise AssertionError(f"no step after {self.all()[-4:]}:\n{logs}") from error
        return self.all()[before:]

    def end(self) -> None:
        (self.folder / "end").touch()


def client_of(kubelet: Kubelet) -> Pod:
    """The pod of docs/kubernetes.md that submits the job of its image."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
    (manifest,) = read(text)
    assert list(schema_faults([manifest])) == []
    manifest["spec"]["containers"][0]["command"] += ["--name", "net"]
    return kubelet.start_pod(manifest["metadata"]["name"], manifest)


def states_in(pod: Pod) -> set[str]:
    """State letters of the processes of a pod."""
    lines = pod.exec("/bin/sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null || true").splitlines()
    return {line.rpartition(") ")[2].split()[0] for line in lines}


def hosts_of(told: list[dict[str, Any]]) -> set[str]:
    return {each["host"] for each in told}


def test_a_job_survives_the_end_of_a_pod_and_a_master_that_moves(open_kubelet: Open, tmp_path: Path) -> None:
    options = ClusterOptions(**SMALL, agents=3)
    kubelet = open_kubelet(render.cluster(options), options)
    names = [kubelet.start("unified-agent", number).name for number in range(3)]
    assert not any(kubelet.pods[name].is_ready for name in names), "there is no master yet"
    kubelet.start("unified-master", 0)
    kubelet.await_ready("unified-master-0", *names)
    client, steps = client_of(kubelet), Steps(tmp_path)
    (spare,) = {*names} - hosts_of(steps.await_more(*kubelet.pods.values()))

    # A pod is deleted in order: its rank moves to the third.
    first, second = sorted({*names} - {spare})
    assert kubelet.delete(first) == 0
    assert hosts_of(steps.await_more(*kubelet.pods.values())) == {second, spare}
    assert kubelet.start("unified-agent", int(first[-1])).address != kubelet.ended[-1].address
    kubelet.await_ready(first)
    # It has come back by its name, with another address, and is what is left when the next one is deleted.
    assert kubelet.delete(second) == 0
    assert hosts_of(before := steps.await_more(*kubelet.pods.values())) == {first, spare}
    kubelet.start("unified-agent", int(second[-1]))

    # The master moves: its volume goes along, its name is elsewhere, and no worker notices.
    assert kubelet.delete("unified-master-0") == 0
    steps.await_more(*kubelet.pods.values())
    kubelet.start("unified-master", 0)
    kubelet.await_ready("unified-master-0", *names)
    after = steps.await_more(*kubelet.pods.values())
    assert {each["pid"] for each in after} == {each["pid"] for each in before}
    for rank in (0, 1):
        done = [each["step"] for each in steps.all() if each["rank"] == rank]
        assert sorted({*done}) == list(range(1, max(done) + 1))
        assert len(done) <= len({*done}) + 2, "at most the step in which a pod ended is done twice, for each of the two"

    # Workers that began before the master moved reach its relay where it is now, by its name.
    assert json.loads(client.exec("unified", "call", "net", "ELASTIC-0", "where")) in {first, spare}

    nodes = json.loads(client.exec("unified", "nodes", "--json"))
    assert {each["node"]: each["state"] for each in nodes} == dict.fromkeys(names, "ALIVE")
    for name in names:
        assert "unified-agent" in kubelet.pods[name].exec("/bin/cat", "/proc/1/cmdline"), "it is process 1"
        assert "Z" not in states_in(kubelet.pods[name]), "and leaves no zombie"
    with pytest.raises(AssertionError, match="Read-only file system"):
        kubelet.pods[first].exec("/bin/touch", "/usr/here")
    steps.end()
    assert client.wait() == 0, client.log
    for name in (*names, "unified-master-0"):
        pod = kubelet.pods[name]
        assert pod.was_ill == "", "no liveness probe failed"
        assert kubelet.delete(name) == 0, pod.log


def test_a_run_whose_second_pod_is_evicted_ends_with_its_drivers_code(open_kubelet: Open, tmp_path: Path) -> None:
    options = RunOptions(**SMALL)
    kubelet = open_kubelet(render.run(options), options)
    pods = [kubelet.start("unified", number) for number in range(2)]
    kubelet.await_ready("unified-0", "unified-1")
    steps = Steps(tmp_path)
    assert hosts_of(steps.await_more(*pods)) == {"unified-0", "unified-1"}
    assert kubelet.delete("unified-1") == 143, "with 0 its index would count as done"
    last = max(each["step"] for each in steps.all())
    kubelet.start("unified", 1)
    after = steps.await_more(*kubelet.pods.values())
    assert hosts_of(after) == {"unified-0", "unified-1"}
    assert min(each["step"] for each in after) >= last, "it goes on from what was saved"
    pods[0].exec("/bin/sh", "-c", KILL_MASTER)
    steps.await_more(*kubelet.pods.values())
    eventually(lambda: "the master ended (killed by SIGKILL); it is started again" in pods[0].log, timeout=WITHIN_S)
    steps.end()
    assert pods[0].wait() == 0, pods[0].log  # successPolicy: now all others are ended
    assert kubelet.delete("unified-1") == 143


def test_the_pods_of_a_jobset_find_each_other_and_it_ends_with_its_drivers_code(
    open_kubelet: Open, tmp_path: Path
) -> None:
    options = RunOptions(**SMALL, jobset=True)
    kubelet = open_kubelet(render.run(options), options)
    (kubelet.workspace / "net.py").write_text(COUNT)
    first, other = kubelet.start("unified-first-0", 0), kubelet.start("unified-others-0", 0)
    steps = Steps(tmp_path)
    assert hosts_of(steps.await_more(first, other, count=3)) == {"unified-first-0-0", "unified-others-0-0"}
    steps.end()
    assert first.wait() == 0, first.log  # successPolicy: now the Job of all others is deleted
    assert kubelet.delete(other.name) == 143


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (("python", "-c", "raise SystemExit(7)"), 7, ""),
        (
            ("no-such-program",),
            2,
            "no-such-program cannot be started: No such file or directory. The image has to have it.",
        ),
    ],
    ids=["an exit code", "no such program"],
)
def test_a_run_fails_with_its_driver(open_kubelet: Open, command: tuple[str, ...], code: int, text: str) -> None:
    options = RunOptions(**SMALL, agents=1, command=command)
    kubelet = open_kubelet(render.run(options), options)
    pod = kubelet.start("unified", 0)
    assert pod.wait() == code, pod.log
    assert text in pod.log


def test_a_run_that_is_ended_stops_its_driver(open_kubelet: Open, tmp_path: Path) -> None:
    options = RunOptions(
        **SMALL,
        agents=1,
        command=("sh", "-c", "trap 'touch /out/told; exit 0' TERM; touch /out/begun; sleep 600 & wait"),
    )
    kubelet = open_kubelet(render.run(options), options)
    pod = kubelet.start("unified", 0)
    eventually((tmp_path / "claim-out/begun").exists, timeout=WITHIN_S)
    assert kubelet.delete("unified-0") == 143, pod.log
    assert (tmp_path / "claim-out/told").exists()


def test_agents_of_a_daemonset_are_named_by_their_nodes_and_the_gateway_shows_the_cluster(open_kubelet: Open) -> None:
    options = ClusterOptions(**SMALL, agents_as="daemonset", gateway=True)
    kubelet = open_kubelet(render.cluster(options), options)
    kubelet.start("unified-master", 0)
    agent = kubelet.workload("unified-agent")["spec"]["template"]
    kubelet.start_pod("unified-agent-x7k2p", agent, {"spec.nodeName": "gpu-node-1"})
    gateway = kubelet.start_pod("unified-gateway-5d9f", kubelet.workload("unified-gateway")["spec"]["template"])
    kubelet.await_ready("unified-master-0", "unified-agent-x7k2p", "unified-gateway-5d9f")
    url = f"http://{gateway.address}:8000/train/none"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=100)
    with pytest.raises(urllib.error.HTTPError, match="404"):  # its master was asked
        urllib.request.urlopen(urllib.request.Request(url, headers={"X-TRAINER-TOKEN": "t" * 48}), timeout=100)
    nodes = kubelet.pods["unified-agent-x7k2p"].exec("unified", "nodes", "--json", env={"UNIFIED_MASTER": MASTER})
    assert [each["node"] for each in json.loads(nodes)] == ["gpu-node-1"]


def test_a_key_that_others_may_read_is_refused_and_the_pod_says_so(open_kubelet: Open) -> None:
    options = ClusterOptions(**SMALL, agents=0)
    objects = json.loads(json.dumps(render.cluster(options)))
    for each in objects:
        if each["kind"] == "StatefulSet":
            each["spec"]["template"]["spec"]["volumes"][-1]["secret"]["defaultMode"] = 0o444
    kubelet = open_kubelet(objects, options)
    pod = kubelet.start("unified-master", 0)
    assert pod.wait() == 2
    assert "is open to others (mode 0444)" in pod.log


@pytest.fixture(autouse=True)
def needs_setpriv() -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("pods need setpriv (util-linux)")
