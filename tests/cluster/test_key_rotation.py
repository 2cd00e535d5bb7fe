"""`unified key rotate` under a running job: nothing stops, and the old key is refused when its time is over."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from unified.security.curve import new_key
from unified.security.keys import KEY_VARIABLE, load_key, time_text, write_key
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]
CALLS = """
import os, pathlib, time
import unified
from unified import RoleGroup, rpc

@rpc
def twice(number: int) -> int:
    return 2 * number

def serve():
    pass

def drive():
    service, number, failed = RoleGroup("service"), 0, 0
    while True:
        number += 1
        try:
            (answer,) = service.call("twice", number).result()
            assert answer == 2 * number
        except unified.UnifiedError as error:
            failed += 1
            print("failed", type(error).__name__, error, flush=True)
        pathlib.Path(os.environ["COUNT"]).write_text(f"{number - failed} {failed}")
        time.sleep(0.05)
"""
SUBMIT = """
import os
from unified.api.builder import DLJobBuilder
job = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU").global_env({"COUNT": os.environ["COUNT"]})
job = job.role("driver").run("calls.drive").resource(accelerator=1)
job = job.role("service").run("calls.serve").resource(accelerator=1).not_driver()
job.build().submit("calls", blocking=False)
"""


class Rotation:
    """A keyed cluster of two nodes, whose job calls from one to the other all the time."""

    def __init__(self, cluster: LocalCluster, folder: Path, key_file: Path) -> None:
        self.cluster = cluster
        self.key_file = key_file
        self.count = folder / "count"
        self.env = {**os.environ, "UNIFIED_MASTER": cluster.address, "COUNT": str(self.count)}
        subprocess.run([sys.executable, "-c", SUBMIT], env=self.env, cwd=folder, check=True, timeout=100)

    def command(self, *words: str, key: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = self.env | ({KEY_VARIABLE: str(key)} if key is not None else {})
        command = [sys.executable, "-m", "unified", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)

    def is_refused(self, key: Path) -> bool:
        done = self.command("nodes", key=key)
        assert done.returncode == 0 or "refused this side's cluster key" in done.stderr, done.stderr
        return done.returncode != 0

    def counts(self) -> tuple[int, int]:
        words = self.count.read_text().split() if self.count.exists() else []
        return (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)

    def go_on(self) -> None:
        """Wait for ten more calls that are answered."""
        before, _ = self.counts()
        eventually(lambda: self.counts()[0] >= before + 10, timeout=100, message="no calls are answered")

    def rotate(self) -> Path:
        """Rotate the key; return a copy of the file as it was before, when the old key's time is over."""
        old = self.key_file.with_name(f"old-{time.monotonic()}.key")
        shutil.copy(self.key_file, old)
        done = self.command("key", "rotate", "--in", "3600")
        assert done.returncode == 0, done.stderr
        again = self.command("key", "rotate")
        assert again.returncode == 2
        assert "has a successor already" in again.stderr
        self.await_news()
        assert not self.is_refused(old), "both are taken until the time comes"
        assert not self.is_refused(self.key_file)
        now = time_text(time.time())  # the hour is over at once
        self.key_file.write_text(re.sub('from = "[^"]+"', f'from = "{now}"', self.key_file.read_text()))
        self.await_news()
        return old

    def await_news(self) -> None:
        """Wait until each daemon has read the file."""
        key = load_key(self.key_file)
        assert key.successor is not None
        heard = f"successor={key.successor.fingerprint} from={time_text(key.replaced_at)}"
        for name in ("master", "node-1", "node-2"):
            log = self.cluster.home / f"{name}.log"
            eventually(lambda log=log: heard in log.read_text(), timeout=100, message=f"{log}: no {heard}")  # type: ignore[misc]

    def restart_master(self) -> None:
        before = self.cluster.master_pid
        os.kill(before, signal.SIGKILL)
        eventually(lambda: self.cluster.master_pid != before, timeout=100)
        eventually(lambda: [node.state for node in self.cluster.nodes] == ["ALIVE", "ALIVE"], timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["tcp", "relay"])
def test_a_key_is_replaced_under_a_running_job(
    local_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: str
) -> None:
    key_file = tmp_path / "keys" / "cluster.key"
    write_key(key_file, new_key())
    monkeypatch.setenv(KEY_VARIABLE, str(key_file))
    monkeypatch.setenv("UNIFIED_BUS_ROUTE", route)
    (tmp_path / "calls.py").write_text(CALLS)
    cluster = local_cluster(nodes=2, devices=1, restart_master=5)
    rotation = Rotation(cluster, tmp_path, key_file)
    rotation.go_on()
    first = rotation.rotate()
    pids = cluster.workers("calls")
    rotation.go_on()
    assert not rotation.is_refused(key_file), "the master listens with the old pair, and takes the new one"
    os.kill(pids["service_1-0_1-0"], signal.SIGKILL)
    eventually(lambda: cluster.workers("calls").get("service_1-0_1-0", 0) not in (0, pids["service_1-0_1-0"]))
    rotation.go_on()
    pids = cluster.workers("calls")
    if route == "tcp":  # clocks may differ by a minute
        eventually(lambda: rotation.is_refused(first), timeout=150, message="the old key is taken for ever")
    rotation.restart_master()
    assert rotation.is_refused(first), "it listens with the new pair now"
    assert not rotation.is_refused(key_file)
    rotation.go_on()

    if route == "tcp":
        second = rotation.rotate()
        rotation.restart_master()
        assert rotation.is_refused(second)
        assert not rotation.is_refused(key_file)
        rotation.go_on()
    assert cluster.workers("calls") == pids, "nobody was restarted"
    assert [job.stage for job in cluster.jobs] == ["RUNNING"]
    print(rotation.counts())
