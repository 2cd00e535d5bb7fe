"""Three hosts far apart, on a network that loses frames, and a job that trains there all the same."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import lines
from tests.support.hosts import FarHosts, Hosts
from tests.support.programs import far_job
from unified.testing import eventually

pytestmark = [pytest.mark.netns, pytest.mark.timeout(400)]

DELAY_S, LOSS = 0.1, 0.05
STEPS = 12
WITHIN_S = 120.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FarHosts]:
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("a network with delay and loss is made of tap devices: /dev/net/tun cannot be used here")
    hosts = FarHosts(tmp_path, 4, delay_s=DELAY_S, loss=LOSS)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


def told(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(folder, name)]


def steps_of(folder: Path, rank: int) -> int:
    return max((each["step"] for each in told(folder, "steps") if each["rank"] == rank), default=0)


def undisturbed() -> Any:
    """Return the weights of the same training in one process."""
    import torch

    own = far_job.model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.cat([far_job.samples(step, rank) for rank in range(far_job.RANKS)])
        own(inputs).square().mean().backward()
        optimizer.step()
    return own.weight.flatten().tolist()


def test_a_job_trains_and_replaces_a_rank_over_a_slow_network_that_loses_frames(
    hosts: FarHosts, tmp_path: Path
) -> None:
    began = time.time()
    eventually(lambda: list(hosts.nodes.values()) == ["ALIVE"] * 3, WITHIN_S, "not all agents are there")
    registered = time.time()
    hosts.run(far_job.__file__, hosts.master, str(tmp_path), str(STEPS), on=1)
    submitted = time.time()
    eventually(lambda: all(steps_of(tmp_path, rank) >= 4 for rank in range(far_job.RANKS)), WITHIN_S, "nobody trains")
    pids = {each["rank"]: each["pid"] for each in told(tmp_path, "steps")}
    killed = time.time()
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: _status(hosts)["stage"] == "STOPPED", WITHIN_S, "the job does not end")
    ended = time.time()
    steps, rounds = told(tmp_path, "steps"), told(tmp_path, "rounds")
    went_on = min(each["at"] for each in steps if each["rank"] == 1 and each["pid"] != pids[1])
    figures = {
        "agents registered": registered - began,
        "submitted": submitted - registered,
        "all ranks begun": max(each["at"] for each in told(tmp_path, "begun")[:3]) - submitted,
        "round begun": max(each["at"] for each in rounds[:3]) - submitted,
        "first step of all": max(each["at"] for each in steps if each["step"] == 1) - submitted,
        "killed to next step of its rank": went_on - killed,
        "whole job": ended - submitted,
        "load": os.getloadavg()[0],
    }
    print(", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    print(f"frames carried {hosts.switch.num_carried}, lost {hosts.switch.num_lost}")
    status = _status(hosts)
    assert status["exit_code"] == 0, status
    for each in told(tmp_path, "weights"):
        assert each["weights"] == pytest.approx(undisturbed(), abs=1e-5)
    for rank in range(far_job.RANKS):
        mine = [each for each in steps if each["rank"] == rank]
        assert mine[-1]["told"] == STEPS, "the service has heard of every step"
        assert len({each["pid"] for each in mine}) == (2 if rank == 1 else 1), (
            "only the killed rank has another incarnation"
        )
    events = [event["event"] for event in hosts.ask("explain", "far")]
    assert "node-lost" not in events, events
    assert list(hosts.nodes.values()) == ["ALIVE"] * 3
    assert not [line for number in range(1, 4) for line in hosts.log(number).splitlines() if "lease" in line]
    assert hosts.switch.num_lost > 0.03 * hosts.switch.num_carried


def _status(hosts: Hosts) -> Any:
    return hosts.ask("status", "far")
