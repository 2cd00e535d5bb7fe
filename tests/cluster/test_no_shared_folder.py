"""A laptop, a master and two hosts that share a key, and no folder: a job brings its code and says what it requires."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import lines
from tests.support.hosts import Hosts
from tests.support.wheels import wheel
from unified.security.curve import new_key
from unified.security.keys import KEY_VARIABLE, write_key
from unified.testing import eventually

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

JOB = """
import sys
from unified.api.builder import DLJobBuilder

if __name__ == "__main__":
    builder = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU").global_env({"OUT": "%s"})
    job = builder.train("net.train").nnodes(2).nproc_per_node(1).resource(accelerator=1).build()
    sys.exit(job.submit("net", ship=True, requirements=sys.argv[1:]))
"""
CODE = """
import os
import sys
import of_this_host
import torch
import torch.distributed as dist
from numbers_of_job import VALUE

def train():
    total = torch.tensor([VALUE * float(of_this_host.VERSION)])
    dist.all_reduce(total)
    with open(os.path.join(os.environ["OUT"], "out"), "a") as out:
        print(int(total.item()), os.getcwd(), sys.prefix, file=out)
"""
REQUIRED = "of_this_host>=10"
LARGE = 8 << 20
LAPTOP = 3
"""Number of the host with no daemon, behind the master's and those of the agents."""


class HostsWithWheels(Hosts):
    """Hosts without a way to an index, where pip finds the wheels of a folder that each host has for itself."""

    def _env(self, number: int) -> dict[str, str]:
        env = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(self.wheels(number))}
        return super()._env(number) | env

    def wheels(self, number: int) -> Path:
        return self.folder / f"h{number}/wheels"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[HostsWithWheels]:
    key = tmp_path / "cluster.key"
    write_key(key, new_key())
    hosts = HostsWithWheels(tmp_path, 4, {KEY_VARIABLE: str(key)}, num_idle=1)
    for number in (1, 2):  # not on the laptop, and another version on each of the others, which says whose it was
        hosts.wheels(number).parent.mkdir()
        wheel(hosts.wheels(number), "of_this_host", f"{10**number}.0")
    with hosts.up():
        yield hosts


def submit(hosts: Hosts, tmp_path: Path, required: str = REQUIRED) -> "subprocess.CompletedProcess[str]":
    """Submit from a folder that is a file system of this command alone."""
    script = 'mount -t tmpfs none "$0" && cp -r "$1"/. "$0" && cd "$0" && exec "$2" job.py "$3"'
    enter = ["nsenter", f"--net=/run/netns/{hosts.namespace(LAPTOP)}", "unshare", "--mount"]
    done = subprocess.run(
        [*enter, "sh", "-c", script, tmp_path / "laptop", tmp_path / "source", sys.executable, required],
        env=hosts._env(LAPTOP) | {"UNIFIED_MASTER": hosts.master},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not list((tmp_path / "laptop").iterdir()), "no other process sees it"
    return done


def environments(tmp_path: Path, number: int) -> dict[str, float]:
    """When each environment of a host was made, by its folder."""
    return {
        str(mark.parent): mark.stat().st_mtime for mark in (tmp_path / f"h{number}/environments").glob("*/complete")
    }


def num_sent(hosts: Hosts, number: int) -> int:
    """Bytes that a host has sent to others, and that its own processes have sent each other."""
    table = subprocess.run(
        ["ip", "netns", "exec", hosts.namespace(number), "cat", "/proc/net/dev"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return sum(int(line.split()[9]) for line in table.splitlines()[2:])


def test_a_laptop_trains_on_hosts_that_have_none_of_its_files(hosts: HostsWithWheels, tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    source = tmp_path / "source"
    source.mkdir()
    (source / "job.py").write_text(JOB % tmp_path)
    (source / "net.py").write_text(CODE)
    (source / "numbers_of_job.py").write_text("VALUE = 3")
    (source / "large.bin").write_bytes(os.urandom(LARGE))
    made, sent = [], [[num_sent(hosts, number) for number in (LAPTOP, 0)]]
    for value, is_shipped in ((3, True), (3, False), (4, True)):
        (source / "numbers_of_job.py").write_text(f"VALUE = {value}")
        done = submit(hosts, tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("ships 4 files" in done.stderr) == is_shipped, done.stderr
        sent.append([num_sent(hosts, number) for number in (LAPTOP, 0)])
        made.append([environments(tmp_path, number) for number in (1, 2)])
    by_laptop, by_master = (
        [late[place] - early[place] for early, late in itertools.pairwise(sent)] for place in (0, 1)
    )
    assert min(by_laptop[0], by_laptop[2]) > LARGE > by_laptop[1], "to the master, unless it has the tree"
    assert min(by_master) > 2 * LARGE, "to two nodes, for each job: their agents are root's"
    found = [line.split() for line in lines(tmp_path, "out")]
    assert [total for total, *_ in found] == ["330"] * 4 + ["440"] * 2, "of 10 and 100, the versions"
    assert len({folder for _, folder, _ in found}) == 6, "three jobs on two hosts"
    assert made[0] == made[1] == made[2], "once a node"
    assert {folder for _, _, folder in found} == {folder for node in made[0] for folder in node}
    assert [len(node) for node in made[0]] == [1, 1]
    eventually(lambda: len(list(tmp_path.glob("h[12]/code/[0-9a-f]*/net.py"))) <= 2, timeout=100, message="one a node")


@pytest.mark.parametrize(
    ("disk", "told"),
    [
        ("", "what the job requires cannot be installed: No matching distribution found for no_such_package==3"),
        ("size=16k", "the environment of the job cannot be made in "),
    ],
    ids=["no such package", "full disk"],
)
def test_what_cannot_be_installed_fails_with_one_sentence_and_leaves_nothing(
    hosts: HostsWithWheels, tmp_path: Path, disk: str, told: str
) -> None:
    for name in ("laptop", "source", "h1/environments", "h2/environments"):
        (tmp_path / name).mkdir()
    (tmp_path / "source/job.py").write_text(JOB % tmp_path)
    with contextlib.ExitStack() as stack:
        for number in (1, 2) if disk else ():
            stack.enter_context(mounted(disk, tmp_path / f"h{number}/environments"))
        done = submit(hosts, tmp_path, REQUIRED if disk else "no_such_package==3")
        assert done.returncode == 1
        (failure,) = (line.split(maxsplit=1)[1] for line in done.stderr.splitlines() if line.startswith("  failure"))
        assert failure.startswith(told), done.stderr
        assert "Traceback" not in done.stderr
        for node in hosts.ask("nodes"):
            assert all(node["free"][kind] == node["resources"][kind] for kind in ("devices", "cpu", "memory_mb")), node
        eventually(lambda: not processes(tmp_path), 100, "pip of the other host goes on")
        left = [path for path in tmp_path.glob("h*/environments/*") if path.suffix != ".log"]
        assert not left + list(tmp_path.glob("h*/run/a-*/requirements-*")) + list(tmp_path.glob("h*/run/a-*/make-*"))


@contextlib.contextmanager
def mounted(disk: str, folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", disk, "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def processes(tmp_path: Path) -> list[str]:
    """Commands that install into environments of these hosts."""
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if f"{tmp_path}/h" in command and "environment" in command]
