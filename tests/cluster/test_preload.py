"""Modules that a job preloads: its zygote imports them, its workers have them, and the driver shows what failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unified.testing import LocalCluster

pytestmark = pytest.mark.processes

SLOW = """
import os, time
open(os.environ["SEEN"], "a").write(f"{os.getpid()}\\n")
time.sleep(0.1)
pid = os.getpid()
"""
MODULES = {
    "slow_of_test": SLOW,
    "bad_of_test": "raise ValueError('no luck')\n",
    "thread_of_test": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
}
DRIVER = """
import os, sys
from unified.api.builder import DLJobBuilder

def look():
    loaded = sys.modules.get("slow_of_test")
    print("it was imported by", {None: "nobody", os.getppid(): "the zygote"}[loaded and loaded.pid], flush=True)

if __name__ == "__main__":
    builder = DLJobBuilder().node_num(1).device_per_node(3).device_type("CPU")
    builder.preload(*sys.argv[1].split())
    builder.workload("worker", "preload_of_test.look").total(3).resource(cpu=0.1)
    raise SystemExit(builder.build().submit("preload"))
"""


def submitted(folder: Path, modules: str, master: str = "local") -> tuple[list[str], str]:
    """Lines of the workers' stdout, and the driver's stderr."""
    (folder / "preload_of_test.py").write_text(DRIVER)
    command = [sys.executable, "preload_of_test.py", modules]
    env = {**environment(folder), "UNIFIED_MASTER": master}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def environment(folder: Path) -> dict[str, str]:
    libraries = folder / "libraries"
    libraries.mkdir(exist_ok=True)
    for name, text in MODULES.items():
        (libraries / f"{name}.py").write_text(text)
    own = {"PYTHONPATH": f"{libraries}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"), "SEEN": str(folder / "seen")}
    return {**os.environ, **own, "UNIFIED_HOME": str(folder / "home")}


LOADED = [f"[worker-{rank}] it was imported by the zygote" for rank in range(3)]


def test_workers_of_a_job_with_a_cluster_of_its_own_have_what_the_zygote_imported_once(tmp_path: Path) -> None:
    out, err = submitted(tmp_path, "slow_of_test trll bad_of_test")
    assert out == LOADED
    assert len((tmp_path / "seen").read_text().splitlines()) == 1
    said = [line.partition("unified: ")[2] for line in err.splitlines() if "unified: preload of" in line]
    assert set(said) == {
        "preload of 'trll' failed: ModuleNotFoundError: No module named 'trll'",
        "preload of 'bad_of_test' failed: ValueError: no luck",
    }
    (log,) = (tmp_path / "home").rglob("node-1.log")
    assert log.read_text().count("event=zygote-up") == 1


def test_a_job_on_a_running_cluster_has_a_zygote_of_its_own(tmp_path: Path) -> None:
    with LocalCluster(nodes=1, devices=3, home=tmp_path / "cluster", env=environment(tmp_path)) as cluster:
        assert submitted(tmp_path, "slow_of_test", cluster.address)[0] == LOADED
        assert len((tmp_path / "seen").read_text().splitlines()) == 1
        out, err = submitted(tmp_path, "slow_of_test thread_of_test", cluster.address)
        assert out == [f"[worker-{rank}] it was imported by nobody" for rank in range(3)], "they are new interpreters"
        assert "unified: preload of 'thread_of_test' started 1 thread(s), which a fork lacks. So workers start" in err
