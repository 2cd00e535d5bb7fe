"""Jobs that are suspended, by hand or because the allocation of their driver ends, and go on with what they saved."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from tests.support.deadlines import missed
from unified.api.builder import DLJobBuilder
from unified.client.cluster_client import connect
from unified.client.foreground import ALLOCATION
from unified.client.handle import JobHandle
from unified.protocol.records import Stage
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

CODE = """
import os, time
from pathlib import Path
from unified import current_worker

def count():
    worker, folder, rank = current_worker(), Path(os.environ["FOLDER"]), os.environ["RANK"]
    saved = folder / f"saved-{rank}"
    step = int(saved.read_text()) if saved.exists() else 0
    assert not worker.should_stop  # from now on it is given its time
    with (folder / "starts").open("a") as file:
        print(rank, step, file=file)
    print("counts", flush=True)
    while not (folder / "end").exists():
        step += 1
        worker.report(step=step)
        time.sleep(0.02)
        if worker.should_stop:
            saved.write_text(str(step))
            return
    print("ended")
"""
SAVING = """
import os, threading, time
from pathlib import Path
from unified import current_worker

def save():
    folder = Path(os.environ["FOLDER"])
    with current_worker().saving():
        (folder / "saves").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        (folder / "saved").touch()

def train():  # without a look at should_stop
    threading.Thread(target=save, daemon=True).start()
    while True:
        time.sleep(0.02)
"""
SNAPSHOTS = """
import os, time
from pathlib import Path
from unified import current_worker

def count():
    worker, folder, rank = current_worker(), Path(os.environ["FOLDER"]), os.environ["RANK"]
    state = {"step": 0}
    found = worker.restore(state)
    if found is not None:
        with (folder / "again").open("a") as file:
            print(rank, found.step, state["step"], "from", found.source, file=file)
    while not worker.should_stop and not (found is not None and (folder / "end").exists()):
        state["step"] += 1
        worker.snapshot(state, state["step"])
        worker.report(step=state["step"])
        time.sleep(0.02)
    if found is None:
        with (folder / "first").open("a") as file:
            print(rank, state["step"], state["step"], file=file)
"""
DRIVER = """
import sys
from unified.api.builder import DLJobBuilder
builder = DLJobBuilder().device_per_node(1).device_type("CPU").global_env({"FOLDER": sys.argv[1]})
builder = builder.workload("counter", "counting.count").total(2).resource(cpu=0.1)
sys.exit(builder.build().submit("counting", blocking=True))
"""


def starts(folder: Path) -> list[tuple[int, int]]:
    return sorted((int(rank), int(step)) for rank, step in map(str.split, lines(folder, "starts")))


def steps(handle: JobHandle) -> list[int]:
    return [worker.progress.step or 0 if worker.progress else 0 for worker in handle.status().workers]


def saved(folder: Path) -> list[tuple[int, int]]:
    return [(rank, int((folder / f"saved-{rank}").read_text())) for rank in range(2)]


def said(cluster: LocalCluster, *words: str) -> str:
    """What a command prints that succeeds."""
    command = [sys.executable, "-m", "unified", *words, "--master", cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_goes_on_at_the_step_that_it_saved(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(counting=CODE)
    builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU").global_env({"FOLDER": str(tmp_path)})
    builder = builder.workload("counter", "counting.count").total(2).resource(cpu=0.1)
    cluster = local_cluster(nodes=2, devices=1)
    handle = cluster.submit(builder.build(), "counting")
    eventually(lambda: min(steps(handle), default=0) > 3)
    handle.suspend("a new switch")
    eventually(lambda: handle.status().num_leaving == 0)
    status = handle.status()
    assert (status.stage, status.suspended, status.budgets) == (Stage.INIT, "a new switch", [])
    assert not any(node.num_workers or node.num_leaving for node in cluster.nodes)
    handle.resume()
    eventually(lambda: len(starts(tmp_path)) == 4)
    assert starts(tmp_path) == sorted([(0, 0), (1, 0), *saved(tmp_path)])
    assert min(step for _, step in saved(tmp_path)) > 3
    (tmp_path / "end").touch()
    assert handle.wait(timeout=200) == 0
    assert (handle.status().budgets, handle.status().num_restarts) == ([], 0)
    assert "WARNING" not in (cluster.home / "master.log").read_text()


@pytest.mark.slow
def test_a_job_goes_on_from_its_snapshots(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(snapshots=SNAPSHOTS)
    builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU").global_env({"FOLDER": str(tmp_path)})
    builder = builder.workload("counter", "snapshots.count").total(2).resource(cpu=0.1)
    cluster = local_cluster(nodes=2, devices=1)
    handle = cluster.submit(builder.build(), "counting")
    eventually(lambda: min(steps(handle), default=0) > 3)
    handle.suspend("a new switch")
    eventually(lambda: handle.status().num_leaving == 0)
    handle.resume()
    (tmp_path / "end").touch()
    assert handle.wait(timeout=200) == 0
    first, again = lines(tmp_path, "first"), lines(tmp_path, "again")
    assert sorted(again) == sorted(f"{line} from memory" for line in first)
    assert (handle.status().budgets, handle.status().num_restarts) == ([], 0)
    assert "WARNING" not in "".join(path.read_text() for path in cluster.home.glob("*.log"))


def test_all_jobs_at_once(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(counting=CODE)
    cluster = local_cluster(nodes=1, devices=2)
    handles = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU").global_env({"FOLDER": str(tmp_path / name)})
        handles.append(cluster.submit(builder.workload("counter", "counting.count").total(1).build(), name))
    eventually(lambda: min([step for handle in handles for step in steps(handle)], default=0) > 3)
    both = f"{handles[0].job_id}, {handles[1].job_id}.\n"
    assert said(cluster, "suspend", "--all", "--reason", "a new switch") == f"suspended: {both}"
    assert [(handle.status().suspended, handle.status().num_leaving) for handle in handles] == [("a new switch", 0)] * 2
    assert all((tmp_path / name / "saved-0").exists() for name in ("first", "second"))  # the command has waited
    assert said(cluster, "resume", "--all") == f"resumed: {both}"
    for handle, name in zip(handles, ("first", "second"), strict=True):
        (tmp_path / name / "end").touch()
        assert handle.wait(timeout=200) == 0


def test_a_save_under_way_is_waited_for(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(saving=SAVING)
    builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU").global_env({"FOLDER": str(tmp_path)})
    builder = builder.workload("saver", "saving.train").total(1).resource(cpu=0.1)
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(builder.build(), "saving", stop_grace_s=0.5)
    eventually(lambda: (tmp_path / "saves").exists())
    handle.suspend("a new switch")
    eventually(lambda: handle.status().num_leaving == 1)
    time.sleep(missed(2.0))
    assert handle.status().num_leaving == 1
    assert not (tmp_path / "saved").exists()
    (tmp_path / "go").touch()
    eventually(lambda: handle.status().num_leaving == 0)
    assert (tmp_path / "saved").exists()
    assert handle.status().budgets == []
    assert "WARNING" not in "".join(path.read_text() for path in cluster.home.glob("*.log"))
    handle.stop()
    handle.wait(timeout=200)


def test_a_driver_within_an_allocation_that_ends_leaves_its_job_suspended(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(counting=CODE, driver=DRIVER)
    cluster = local_cluster(nodes=1, devices=2)
    with subprocess.Popen(
        [sys.executable, tmp_path / "project/driver.py", tmp_path],
        env={**os.environ, "UNIFIED_MASTER": cluster.address, ALLOCATION: "4711"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        for _ in range(2):  # what workers print is shown by a driver that watches its job
            assert driver.stdout.readline().endswith("counts\n")
        driver.send_signal(signal.SIGTERM)
        _, err = driver.communicate(timeout=100)
    assert driver.returncode == os.EX_TEMPFAIL, err
    assert "suspended: allocation 4711 of SLURM ends: SIGTERM in its driver; it goes on with: unified resume" in err
    assert [step > 0 for _, step in saved(tmp_path)] == [True, True]
    with connect(cluster.address) as client, client.job("counting") as handle:
        assert handle.status().suspended == "allocation 4711 of SLURM ends: SIGTERM in its driver"
        handle.resume()
        eventually(lambda: len(starts(tmp_path)) == 4)
        (tmp_path / "end").touch()
        assert handle.wait(timeout=200) == 0
