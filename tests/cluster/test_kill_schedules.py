"""Random schedules of kills, at random moments of a job: each job ends with the right result all the same, and
nothing is left behind.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import psutil
import pytest

from tests.cluster.conftest import PROGRAMS
from unified.api.builder import DLJobBuilder
from unified.client.embedded import EmbeddedCluster
from unified.testing import FAST, Belongings, eventually, left_behind

pytestmark = [pytest.mark.processes, pytest.mark.slow]

Target = Literal["trainer", "scorer", "zygote", "store", "agent", "master"]
STEPS = 40
RANKS = 2
EXPECTED = sum(2 * step * rank for step in range(1, STEPS + 1) for rank in range(1, RANKS + 1))
LATEST_S = 1.8
"""Later than the end of a job that nothing disturbs."""
WITHIN_S = 120.0
PER_CLUSTER = 5
"""Schedules on one cluster: a fresh one has no zygote yet, a used one has what earlier kills left it with."""
MANY = 1_000_000


class Kill(NamedTuple):
    """One kill: so many seconds after the one before, or after the submission."""

    after_s: float
    target: Target
    choice: float
    """Which of several: a fraction of their number."""


def schedule_of(seed: int) -> list[Kill]:
    rng = random.Random(seed)
    targets: tuple[Target, ...] = get_args(Target)
    moments = sorted(rng.uniform(0.0, LATEST_S) for _ in range(rng.randint(1, 4)))
    gaps = [after - before for before, after in zip([0.0, *moments], moments, strict=False)]
    return [Kill(round(gap, 3), rng.choice(targets), rng.random()) for gap in gaps]


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """Whatever the test leaves behind is its failure."""
    before = Belongings()
    yield
    assert left_behind(before) == []


@pytest.mark.parametrize("first", range(0, 100, PER_CLUSTER))
@pytest.mark.timeout(PER_CLUSTER * WITHIN_S)
@pytest.mark.usefixtures("undisturbed")
def test_a_job_ends_with_the_right_result_whatever_is_killed(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    cluster = EmbeddedCluster(
        2, 2, home=tmp_path / "cluster", env=FAST, max_agent_restarts=MANY, max_master_restarts=MANY
    )
    with cluster:
        for seed in range(first, first + PER_CLUSTER):
            folder = tmp_path / f"seed-{seed}"
            folder.mkdir()
            run(cluster, folder, seed)
            eventually(
                lambda: not workers_of(cluster), timeout=100, message=f"seed {seed}: workers of the job are left"
            )
    assert [left for left in cluster.left_behind if not left.startswith("socket")] == []


def run(cluster: EmbeddedCluster, folder: Path, seed: int) -> None:
    """Submit a job, kill by the schedule, and look at the result."""
    kills = schedule_of(seed)
    what = f"seed {seed}, role restart {bool(seed % 2)}: {kills}"
    envs = {"KILL_FOLDER": str(folder), "KILL_STEPS": str(STEPS)}
    builder: Any = DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU").global_env(envs)
    builder.train("kill_ranks.train").nnodes(RANKS).nproc_per_node(1).max_restart(MANY).end()
    builder.workload("scorer", "kill_ranks.serve").total(1).not_driver().max_restart(MANY).end()
    handle = builder.build().submit(
        f"kills-{seed}",
        blocking=False,
        master=cluster.address,
        failover_exec_strategy=1 + seed % 2,
        node_max_restart=MANY,
        job_max_restart=MANY,
    )
    try:
        for kill in kills:
            time.sleep(kill.after_s)
            victims = targets_of(cluster)[kill.target]
            if victims:
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(victims[int(kill.choice * len(victims))], signal.SIGKILL)
        assert handle.wait(timeout=WITHIN_S) == 0, what
    except TimeoutError:
        status = handle.status()
        raise AssertionError(f"{what}\n{status}") from None
    finally:
        handle.close()
    assert (folder / "result").read_text() == f"{STEPS} {EXPECTED}", what


def targets_of(cluster: EmbeddedCluster) -> dict[Target, list[int]]:
    """Pids of what may be killed now, which may be nothing."""
    found: dict[Target, list[int]] = {
        "agent": [pid for pid in cluster.agent_pids if psutil.pid_exists(pid)],
        "master": [pid for pid in [cluster.master_pid] if psutil.pid_exists(pid)],
        **{name: [] for name in ("trainer", "scorer", "zygote", "store")},
    }
    for pid, command in below(cluster):
        if command.startswith("unified worker: "):
            role = command.removeprefix("unified worker: ").partition(" ")[0].partition("_")[0]
            if role in found:
                found[role].append(pid)
        elif "unified.worker.zygote" in command:
            found["zygote"].append(pid)
    return found


def workers_of(cluster: EmbeddedCluster) -> list[int]:
    return [pid for pid, command in below(cluster) if command.startswith("unified worker: ")]


def below(cluster: EmbeddedCluster) -> Iterator[tuple[int, str]]:
    """All processes below the agents, with their command lines."""
    for agent in cluster.agent_pids:
        try:
            for process in psutil.Process(agent).children(recursive=True):
                yield process.pid, " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
