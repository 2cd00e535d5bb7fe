"""``unified run`` beside torchrun: one job of two hosts, the submitter's environment, paths, ports, reasons."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster
from tests.support.ports import unused_port
from unified.errors import UnifiedError
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes

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
TUTORIAL = """
import os, sys
import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = sys.argv[1]
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), flush=True)
dist.destroy_process_group()
"""

WAITS = """
import os, time

while not os.path.exists("go"):
    time.sleep(0.01)
"""

Run = Callable[..., subprocess.Popen[str]]


def _take_all_signals() -> None:
    """Undo what nohup, and the background of a shell, have their processes ignore."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def unified_run(tmp_path: Path) -> Iterator[Run]:
    """Start `unified run`; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **env: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("UNIFIED_", "PET_"))}
        launcher = subprocess.Popen(
            [sys.executable, "-m", "unified", "run", *arguments],
            cwd=tmp_path,
            env={**inherited, "UNIFIED_MASTER": "", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_take_all_signals,
        )
        started.append(launcher)
        return launcher

    yield run
    for launcher in started:
        launcher.kill()
        launcher.communicate()


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


def _is_running(cluster: LocalCluster, num_workers: int = 2) -> bool:
    try:
        return len(cluster.workers("exp7")) == num_workers
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


@pytest.mark.usefixtures("without_torch")
def test_hosts_with_different_numbers_of_ranks_are_told_both(
    tmp_path: Path, unified_run: Run, local_cluster: Cluster
) -> None:
    cluster = local_cluster(nodes=2, devices=2)
    (tmp_path / "waits.py").write_text(WAITS)
    line = ["--nnodes=2", "--rdzv-id=exp7", "--rdzv-endpoint=h0:29400", "waits.py"]
    first = unified_run("--nproc-per-node=2", *line, UNIFIED_MASTER=cluster.address)
    eventually(lambda: _is_running(cluster, 4), timeout=100, message="the job did not run")
    second = unified_run("--nproc-per-node=1", *line, UNIFIED_MASTER=cluster.address)
    told = second.communicate(timeout=100)[1]
    assert second.returncode == 1
    assert re.search(r"has 2 groups of 2 workers, and \S+ asks for 2 groups of 1 worker\. The commands", told), told
    assert first.stderr is not None
    while told.partition("role ")[2].strip() not in (printed := first.stderr.readline()):
        assert printed, "the first command ended"
    (tmp_path / "go").touch()
    first.communicate(timeout=100)
    assert first.returncode == 0


@pytest.mark.usefixtures("without_torch")
def test_a_second_world_at_one_rendezvous_of_this_host_is_refused(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    port = unused_port()
    both = [
        unified_run("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={name}:{port}", "waits.py")
        for name in ("localhost", "127.0.0.1")
    ]
    eventually(lambda: any(run.poll() is not None for run in both), timeout=100)
    refused, kept = sorted(both, key=lambda run: run.poll() is None)
    assert f"process {kept.pid} on this host has a world at --rdzv-endpoint=" in refused.communicate(timeout=100)[1]
    assert (refused.returncode, kept.poll()) == (2, None)
    (tmp_path / "go").touch()
    _, err = kept.communicate(timeout=100)
    assert kept.returncode == 0, err


def test_a_script_that_chooses_the_store_s_address_has_it_in_rank_0(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    port = str(unused_port())
    ran = unified_run("--nproc-per-node=2", "tutorial.py", port)
    out, err = ran.communicate(timeout=100)
    assert ran.returncode == 0, err
    assert out.count("sum 2.0") == 2
    assert err.count(f"this script sets MASTER_ADDR=localhost and MASTER_PORT={port} itself") == 1


FIRST_LINE = """
import os, socket, sys
import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = name = "localhost" if sys.argv[1] == "localhost" else socket.gethostname()
os.environ.setdefault("MASTER_PORT", "12355")
arguments = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
if len(sys.argv) > 2:
    arguments["init_method"] = f"tcp://{name}:{sys.argv[2]}"
dist.init_process_group("gloo", **arguments)
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["localhost", "hostname"])
@pytest.mark.parametrize("by_url", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_name_of_this_host_is_the_round_s_store(
    name: str, by_url: bool, tmp_path: Path, unified_run: Run
) -> None:
    (tmp_path / "first.py").write_text(FIRST_LINE)
    port = str(unused_port())
    words = ["--master-addr=localhost", f"--master-port={port}"] if by_url else []
    ran = unified_run("--nproc-per-node=2", *words, "first.py", name, *([port] if by_url else []))
    out, err = ran.communicate(timeout=100)
    assert ran.returncode == 0, err
    assert out.count("sum 2.0") == 2
    assert "itself, so rank 0 serves the store" not in err


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_within_a_rank_it_has_a_cluster_of_its_own(tmp_path: Path, unified_run: Run) -> None:
    inner = [sys.executable, "-m", "unified", "run", "--nproc-per-node=2", "inner.py"]
    (tmp_path / "inner.py").write_text("import os\nprint('inner', os.environ['RANK'], flush=True)\n")
    (tmp_path / "outer.py").write_text(f"import subprocess, sys\nsys.exit(subprocess.run({inner}).returncode)\n")
    ran = unified_run("--nproc-per-node=1", "outer.py")
    out, err = ran.communicate(timeout=100)
    assert ran.returncode == 0, err
    assert sorted(line.rpartition("inner ")[2] for line in out.splitlines() if "inner" in line) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_a_hang_ends_a_run_that_says_so(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    ran = unified_run("--hang-timeout=1", "--max-restarts=0", "sleeps.py")
    _, err = ran.communicate(timeout=100)
    assert ran.returncode == 1
    assert "hang: no progress for 1 s" in err


HANDLES = """
import os, signal, sys, time
from pathlib import Path

came = []
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda number, frame: came.append(signal.Signals(number).name))
print("up", flush=True)
until = time.monotonic() + 100
while set(came) != set(sys.argv[1:]) and time.monotonic() < until:  # one may come twice if the master is slow
    time.sleep(0.01)
print("came", os.environ["RANK"], *sorted(set(came)), flush=True)
while not Path("go").exists():
    time.sleep(0.01)
"""


def until_shown(ran: subprocess.Popen[str], text: str, count: int) -> None:
    """Read the command's output up to these lines: before it shows output, it has no job to pass signals on to."""
    assert ran.stdout is not None
    for _ in range(count):
        while text not in (line := ran.stdout.readline()):
            assert line, ran.communicate()[1]


@pytest.mark.usefixtures("without_torch")
def test_signals_go_to_the_ranks_that_handle_them_and_the_run_goes_on(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "handles.py").write_text(HANDLES)
    names = ["SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"]
    ran = unified_run("--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGQUIT", "handles.py", *names)
    until_shown(ran, "up", 2)
    for name in [*names, "SIGWINCH"]:
        ran.send_signal(signal.Signals[name])
    assert ran.stdout is not None
    came = sorted(ran.stdout.readline().partition("came ")[2].strip() for _ in range(2))
    assert came == [f"{rank} {' '.join(names)}" for rank in range(2)]
    ran.send_signal(signal.SIGUSR1)  # once more, and it still goes on
    (tmp_path / "go").touch()
    _, err = ran.communicate(timeout=100)
    assert ran.returncode == 0, err
    assert "SIGUSR1 goes to the workers that handle it" in err


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_ranks_that_do_not_handle_a_signal_are_left_alone(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "waits.py").write_text(HANDLES)
    ran = unified_run("waits.py")
    until_shown(ran, "up", 1)
    ran.send_signal(signal.SIGUSR1)
    ran.send_signal(signal.SIGHUP)
    assert ran.stderr is not None
    while "SIGHUP goes to the workers" not in ran.stderr.readline():
        assert ran.poll() is None
    (tmp_path / "go").touch()
    _, err = ran.communicate(timeout=100)
    assert ran.returncode == 0, err


@pytest.mark.usefixtures("without_torch")
def test_the_environment_s_template_is_in_front_of_lines_of_tee(tmp_path: Path, unified_run: Run) -> None:
    (tmp_path / "says.py").write_text("print('it runs', flush=True)\n")
    template = "<${role_name} $rank ${local_rank} $unknown $$> "
    options = ["--nproc-per-node=2", "--role=actor", "--tee=3"]
    ran = unified_run(*options, "says.py", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template, TMPDIR=str(tmp_path))
    out, err = ran.communicate(timeout=100)
    assert ran.returncode == 0, err
    assert sorted(out.splitlines()) == [f"<actor {rank} {rank} $unknown $> it runs" for rank in range(2)]


def test_a_signal_that_is_none_is_named(tmp_path: Path, unified_run: Run) -> None:
    ran = unified_run("--signals-to-handle=SIGUSR1,SIGUSRR2", "x.py")
    _, err = ran.communicate(timeout=100)
    assert ran.returncode == 2
    assert "--signals-to-handle: 'SIGUSRR2' is no signal. Did you mean 'SIGUSR2'?" in err


@pytest.mark.usefixtures("without_torch")
def test_a_temporary_folder_of_90_characters_is_no_obstacle(tmp_path: Path, unified_run: Run) -> None:
    folder = tmp_path / ("long-" * 20)
    folder.mkdir()
    assert len(str(folder)) >= 90
    (tmp_path / "says.py").write_text("print('it runs', flush=True)\n")
    ran = unified_run("says.py", TMPDIR=str(folder), XDG_RUNTIME_DIR=str(folder))
    out, err = ran.communicate(timeout=100)
    assert ran.returncode == 0, err
    assert "it runs" in out
