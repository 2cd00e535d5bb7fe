"""Ranks that are no Python: any program, with a rank's environment, output, exit code and signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, lines
from unified import process
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

WAITS = """#!/bin/sh
trap 'echo "term $RANK" >> signals; exit 0' TERM
echo "$$" >> pids
while true; do sleep 0.05; done
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return str(folder / name)


def submit(cluster: LocalCluster, folder: Path, entry: str) -> JobHandle:
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    builder.train(entry).total(2).per_group(2).max_restart(0)
    return cluster.submit(builder.build(), "programs", working_dir=str(folder))


def test_torchrun_s_no_python(tmp_path: Path) -> None:
    write(tmp_path, "rank.sh", '#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $1"\nexit $2\n')
    words = [sys.executable, "-m", "unified", "run", "--no-python", "--nproc-per-node=2"]
    for code in ("0", "7"):
        ran = subprocess.run(
            [*words, "--max-restarts=0", "./rank.sh", "a b", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (ran.returncode == 0) == (code == "0"), ran.stderr
        assert "rank 0 of 2: a b" in ran.stdout
        assert "rank 1 of 2: a b" in ran.stdout
    assert "exited with code 7" in ran.stderr


@pytest.mark.slow
def test_a_program_has_the_signal_of_a_stop_and_its_grace(local_cluster: Cluster, tmp_path: Path) -> None:
    handle = submit(local_cluster(nodes=1, devices=2), tmp_path, write(tmp_path, "waits.sh", WAITS))
    eventually(lambda: len(lines(tmp_path, "pids")) == 2)
    handle.stop()
    handle.wait(timeout=200)
    assert sorted(lines(tmp_path, "signals")) == ["term 0", "term 1"]
    eventually(lambda: not any(process.is_alive(int(pid)) for pid in lines(tmp_path, "pids")))


@pytest.mark.slow
def test_a_program_that_is_killed_has_failed_so_and_none_is_left(local_cluster: Cluster, tmp_path: Path) -> None:
    handle = submit(local_cluster(nodes=1, devices=2), tmp_path, write(tmp_path, "waits.sh", WAITS))
    eventually(lambda: len(lines(tmp_path, "pids")) == 2)
    os.kill(int(lines(tmp_path, "pids")[0]), signal.SIGKILL)
    assert handle.wait(timeout=200) != 0
    end = handle.status().end
    assert end is not None
    assert "SIGKILL" in end.failure.summary
    eventually(lambda: not any(process.is_alive(int(pid)) for pid in lines(tmp_path, "pids")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("--no-python nowhere-to-be-found", "'nowhere-to-be-found' cannot be started on this node: No such file"),
        ("--no-python ./headless", "'./headless' cannot be started on this node: it has no #! line"),
    ],
)
def test_a_program_that_cannot_be_started_is_named(
    local_cluster: Cluster, tmp_path: Path, entry: str, message: str
) -> None:
    write(tmp_path, "headless", "echo\n")
    handle = submit(local_cluster(nodes=1, devices=2), tmp_path, entry)
    assert handle.wait(timeout=200) == 1
    end = handle.status().end
    assert end is not None
    assert message in end.failure.summary
    assert end.failure.category == "setup"


SIGNALS = """#!/bin/sh
test "$TORCHELASTIC_RESTART_COUNT" != 0 || exit 3
trap 'echo "came to $RANK"; exit 0' USR2
echo "up $RANK"
while true; do sleep 0.05; done
"""


def test_a_program_starts_again_and_gets_the_signals_that_it_handles(tmp_path: Path) -> None:
    write(tmp_path, "rank.sh", SIGNALS)
    words = [sys.executable, "-m", "unified", "run", "--no-python", "--nproc-per-node=2", "--max-restarts=1"]
    with subprocess.Popen([*words, "./rank.sh"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            up = sorted(launcher.stdout.readline().rpartition("] ")[2] for _ in range(2))
            assert up == ["up 0\n", "up 1\n"]
            launcher.send_signal(signal.SIGUSR1)  # which nobody handles
            launcher.send_signal(signal.SIGUSR2)
            out, _ = launcher.communicate(timeout=100)
        finally:
            launcher.kill()
    assert launcher.returncode == 0
    assert sorted(line.rpartition("] ")[2] for line in out.splitlines()) == ["came to 0", "came to 1"]
