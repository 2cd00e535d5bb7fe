"""Scripts that set `MASTER_ADDR` themselves, as ranks on two hosts: they work by rank 0's address, or fail at once."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts

pytestmark = [pytest.mark.processes, pytest.mark.netns]

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = sys.argv[1], "12355"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path, 3).up() as hosts:
        yield hosts


def test_the_address_of_rank_0_works_and_no_other(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "tutorial.py").write_text(SCRIPT)

    def run(address: str) -> "subprocess.CompletedProcess[str]":
        words = ["-m", "unified", "run", "--master", hosts.master, "--nnodes=2", "--nproc-per-node=1"]
        command = [*hosts._command(0), *words, "--max-restarts=0", str(tmp_path / "tutorial.py"), address]
        return subprocess.run(
            command, env=hosts._env(0), cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )

    told = {address: run(address) for address in (f"{hosts.subnet}.11", f"{hosts.subnet}.12", "localhost")}
    (right,) = (address for address, ran in told.items() if ran.returncode == 0)
    assert right != "localhost"
    assert told[right].stdout.count("sum 2.0") == 2
    assert f"this script sets MASTER_ADDR={right} and MASTER_PORT=12355 itself" in told[right].stderr
    for address, ran in told.items():
        if address != right:
            why = "ranks of other hosts cannot reach" if address == "localhost" else "no address of the host of rank 0"
            assert f"MASTER_ADDR={address} and MASTER_PORT=12355 itself, which" in ran.stderr
            assert why in ran.stderr
            assert "Delete the two lines: the runtime has set MASTER_ADDR=" in ran.stderr
