"""``unified run`` beside torchrun: one job of two hosts, the submitter's environment, paths, ports, reasons."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster
from tests.support.ports import unused_port
from unified.errors import UnifiedError
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.cluster

TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
import beside

dist.init_process_group("gloo")
dist.barrier()
names = "RANK WORLD_SIZE FOO BAR NAME PYTHONHASHSEED OMP_NUM_THREADS TORCHELASTIC_RUN_ID MASTER_PORT".split()
facts = {name: os.environ.get(name) for name in names}
facts.update(hash=hash("unified"), path=sys.path, argv=sys.argv[1:])
facts.update(secret=os.environ.get("MY_TOKEN"))
print("FACTS", json.dumps(facts), flush=True)
while not Path("go").exists():
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def unified_run(tmp_path: Path) -> Run:
    def run(*arguments: str, **env: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("UNIFIED_", "PET_"))}
        return subprocess.Popen(
            [sys.executable, "-m", "unified", "run", *arguments],
            cwd=tmp_path,
            env={**inherited, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def facts_of(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line.partition("FACTS ")[2]) for line in text.splitlines() if "FACTS " in line]
    return sorted(found, key=lambda facts: facts["RANK"])


@pytest.mark.slow
def test_the_same_command_on_two_hosts_is_one_job_with_the_submitter_s_environment(
    tmp_path: Path, unified_run: Run, local_cluster: Cluster
) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train").write_text(TRAIN)
    (folder / "beside.py").touch()
    port = str(unused_port())
    line = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-id=exp7", "--rdzv-backend=c10d", "--rdzv-endpoint=h0:29400"]
    line += [f"--master-port={port}", "--env", "BAR=2", "code/train", "--lr", "1"]
    env = {"UNIFIED_MASTER": cluster.address, "FOO": "1", "NAME": "mine", "PYTHONHASHSEED": "7", "MY_TOKEN": "x"}
    hosts = [unified_run(*line, **env, OMP_NUM_THREADS="3") for _ in range(2)]
    eventually(lambda: _is_running(cluster), timeout=100, message="the job did not run")
    (tmp_path / "go").touch()
    told = [host.communicate(timeout=100) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], told
    assert [job.name for job in cluster.jobs] == ["exp7"]
    first, second = facts_of(told[0][0])
    assert facts_of(told[1][0]) == [first, second]
    plain_path = json.loads(_printed("import json, sys; print(json.dumps(sys.path))"))
    for rank, facts in enumerate((first, second)):
        assert {name: facts[name] for name in ("RANK", "WORLD_SIZE", "FOO", "BAR", "NAME")} == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "FOO": "1",
            "BAR": "2",
            "NAME": "mine",
        }
        assert facts["hash"] == int(_printed("print(hash('unified'))", PYTHONHASHSEED="7"))
        assert facts["OMP_NUM_THREADS"] == "3"
        assert (facts["TORCHELASTIC_RUN_ID"], facts["MASTER_PORT"]) == ("exp7", port)
        assert facts["path"] == [str(folder), *plain_path]
        assert (facts["argv"], facts["secret"]) == (["--lr", "1"], None)
    assert "MY_TOKEN" in told[0][1]
    assert sum("this command joins it" in err for _, err in told) == 1


def _is_running(cluster: LocalCluster) -> bool:
    try:
        return len(cluster.workers("exp7")) == 2
    except UnifiedError:
        return False


def _printed(code: str, **env: str) -> str:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, check=True, text=True).stdout


RECORDED = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

print("world of", os.environ["WORLD_SIZE"], flush=True)

@record
def main():
    raise ValueError("bad batch")

try:
    main()
except ValueError:
    os._exit(3)
"""


def test_what_record_wrote_is_the_reason_and_one_host_is_a_world_of_one(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "train.py").write_text(RECORDED)
    host = unified_run("--nnodes=1:2", "train.py", UNIFIED_HOME=str(tmp_path / "home"))
    out, err = host.communicate(timeout=100)
    assert host.returncode == 1, (out, err)
    assert "ValueError: bad batch (exited with code 3)" in err
    assert ": 1 node of " in err
    assert "] world of 1\n" in out or out == "world of 1\n"


def test_two_hosts_without_a_master_are_refused(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "train.py").touch()
    for rank in ("0", "1"):
        host = unified_run("--nnodes=2", f"--node-rank={rank}", "--master-addr=h0", "train.py")
        assert host.communicate(timeout=100)[1].count("without a master") == 1
        assert host.returncode == 2
