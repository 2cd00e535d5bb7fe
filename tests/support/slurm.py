"""A real SLURM on this host: munged, slurmctld, and a slurmd for each of its nodes, in a folder, on loopback."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support import packages
from unified import process
from unified.testing import eventually

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SrunPortRange={first}-{last}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=2
SlurmdTimeout=20
TCPTimeout=5
KillWait=30
MinJobAge=600
ReturnToService=2
PropagateResourceLimits=NONE
"""


class NoSlurmError(Exception):
    """SLURM is not installed, and cannot be."""


def install() -> None:
    """Install SLURM where it is missing and this process may; NoSlurmError: it is not there."""
    if all(shutil.which(program, path=PATH) for program in PROGRAMS):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoSlurmError(f"needs {', '.join(PACKAGES)}, which only root can install here")
    if why := packages.install(PACKAGES):
        raise NoSlurmError(f"cannot be installed: {why}")


class SlurmCluster:
    """Three nodes of four CPUs, ``n1`` to ``n3``."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.conf = folder / "slurm.conf"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._others: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        port = _free_ports(len(self.names) + 40)
        first = port + len(self.names) + 1
        host = socket.gethostname().partition(".")[0]
        text = _CONF.format(host=host, port=port, user=user, folder=self.folder, first=first, last=first + 38)
        for number, name in enumerate(self.names, 1):
            text += (
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + number} CPUs=4 RealMemory=4096\n"
            )
        text += f"PartitionName=dev Nodes={','.join(self.names)} Default=YES MaxTime=INFINITE State=UP\n"
        text += f"PartitionName=cpu Nodes={self.names[-1]} MaxTime=INFINITE State=UP\n"
        self.conf.write_text(text)
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        os.environ["SLURM_CONF"] = str(self.conf)
        munge = [f"--{key}={self.folder}/munged.{key}" for key in ("pid-file", "log-file", "seed-file")]
        munge += [f"--socket={self.folder}/munge.socket", f"--key-file={self.folder}/munge.key"]
        self._others.append(self._daemon("munged", "--force", "--foreground", *munge))
        eventually((self.folder / "munge.socket").exists, timeout=100)
        self._others.append(self._daemon("slurmctld", "-D", "-f", str(self.conf)))
        for name in self.names:
            self.start_node(name)
        eventually(
            lambda: self.states() == dict.fromkeys(self.names, "idle"), timeout=100, message="nodes are not idle"
        )

    def start_node(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._nodes[name] = self._daemon("slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node and all that it has started, as if its host were gone."""
        self._nodes[name].kill()
        self._nodes[name].wait()
        own = f"SLURMD_NODENAME={name}"

        def left() -> list[int]:
            tasks = [one for one in process.every_process() if one.is_alive and process.has_environment(one.pid, own)]
            found = {one.pid for one in tasks if process.has_environment(one.pid, f"SLURM_CONF={self.conf}")}
            steps = {one.parent for one in tasks if one.pid in found and _is_step(one.parent)}
            return sorted(found | steps)

        process.kill_until_none(left)

    def states(self) -> dict[str, str]:
        """States of nodes by their names, as far as SLURM answers."""
        words = ["sinfo", "--noheader", "--Node", "--partition=dev", "--format=%N %t"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, env=self.env())
        return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())

    def run(self, *words: str, timeout: float = 60) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, env=self.env())
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": PATH}

    def state_of(self, slurm_id: str) -> str:
        """State of a job, and its exit code where it has ended, as ``COMPLETED 0:0``."""
        text = self.run("scontrol", "show", "job", slurm_id, "--oneliner").splitlines()[0]
        facts = dict(word.partition("=")[::2] for word in text.split() if "=" in word)
        return (
            facts["JobState"]
            if facts["JobState"] in ("PENDING", "RUNNING")
            else f"{facts['JobState']} {facts['ExitCode']}"
        )

    def close(self) -> None:
        """Cancel what runs, and end every process of it."""
        subprocess.run(["scancel", "--user", str(os.getuid())], env=self.env(), timeout=100, check=False)
        mark = f"SLURM_CONF={self.conf}"

        def left() -> list[int]:
            found = [one.pid for one in process.every_process() if process.has_environment(one.pid, mark)]
            return [pid for pid in found if pid != os.getpid()]

        try:
            deadline = time.monotonic() + 30
            while self.run("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            process.kill_until_none(left)
            for daemon in (*self._nodes.values(), *self._others):
                daemon.kill()
                daemon.wait()
            os.environ.pop("SLURM_CONF", None)

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        """Start one, which dies with this process."""
        with (self.folder / f"{words[0]}.out").open("ab") as log:
            return subprocess.Popen(
                words,
                env=self.env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: process.die_with_parent(signal.SIGKILL),
            )


def _is_step(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
    except OSError:
        return False


def _free_ports(number: int) -> int:
    """The first of so many ports in a row that are free now, below those that the kernel gives to others."""
    for _ in range(100):
        first = random.randrange(15_000, 30_000)
        try:
            for port in range(first, first + number):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")
