"""An allocation of SLURM, and a node's part of it, from the environment that SLURM gives. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from unified.errors import UsageError
from unified.job.spec import HET_RESOURCE
from unified.values import Value

MANY = 1_000_000
"""Amount of the resource that marks the nodes of a component. Each worker that has to run there takes 1."""
LEAVE_AFTER_S = 60
"""Seconds without a message of the master after which an agent ends: SLURM leaves steps of a lost node running."""
IN_IMAGE = ("unified",)
"""Command line of Unified in the image of a container, which has a Python of its own."""
_OF_TASKS = re.compile(r"(SLURM_(PROCID|LOCALID|GTIDS|NTASKS|NPROCS|TASK_PID|STEP_\w+|STEPID|SRUN_\w+)|PMIX?_.*)\Z")
"""Variables of srun's task, the agent. Libraries in workers would take them for the workers' own ranks."""


class SlurmAllocation(Value, frozen=True, kw_only=True):
    """An allocation, as one of its processes sees it."""

    slurm_id: str
    nodes: str
    """Nodes as SLURM writes them, such as ``n[1-3]``."""
    num_nodes: int
    node: str
    """Name of the node of this process; empty on a login node."""
    num_restarts: int
    cpus_per_task: str
    num_groups: int
    """Components of a heterogeneous job; 1 for any other."""

    @classmethod
    def here(cls, env: Mapping[str, str]) -> Self:
        """Return the allocation of this process; UsageError: it is in none."""
        slurm_id = env.get("SLURM_JOB_ID", "")
        if not slurm_id:
            raise UsageError(
                "this process is in no allocation of SLURM. `unified slurm submit` and `unified slurm run` make one; "
                "`salloc -N 2` gives a shell in one."
            )
        num_groups = int(env.get("SLURM_HET_SIZE") or 1)
        ends = [f"_HET_GROUP_{group}" for group in range(num_groups)] if num_groups > 1 else [""]
        return cls(
            slurm_id=slurm_id,
            nodes=",".join(env.get(f"SLURM_JOB_NODELIST{end}", "") for end in ends),
            num_nodes=sum(int(env.get(f"SLURM_JOB_NUM_NODES{end}") or 1) for end in ends),
            node=env.get("SLURMD_NODENAME", ""),
            num_restarts=int(env.get("SLURM_RESTART_COUNT") or 0),
            cpus_per_task=env.get("SLURM_CPUS_PER_TASK", ""),
            num_groups=num_groups,
        )

    def steps(self) -> list[list[str]]:
        """Return the words of srun for one task on each node. A heterogeneous job has a step for each component,
        because a step over several components gives its stdin to only one of them.
        """
        words = ["srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--overlap"]
        words += ["--ntasks-per-node=1"]
        if self.num_groups > 1:
            return [[*words, f"--het-group={group}"] for group in range(self.num_groups)]
        words += [f"--nodes={self.num_nodes}", f"--ntasks={self.num_nodes}"]
        return [words + ([f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else [])]


class NodeOptions(Value, frozen=True, kw_only=True):
    """Options of the agents of an allocation; UsageError: there are two images."""

    devices: int | None = None
    """Virtual devices of each node; None: real ones."""
    interface: str = ""
    """Network interface whose address each node has; empty: the one towards the others."""
    container_image: str = ""
    """Image in which Pyxis runs the agents."""
    apptainer: str = ""
    """Image in which Apptainer runs the agents."""

    def __post_init__(self) -> None:
        if self.container_image and self.apptainer:
            raise UsageError("--container-image and --apptainer exclude each other: an agent runs in one image.")

    def words(self) -> list[str]:
        """Return these options as words for `unified slurm exec`."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value not in (None, "")]

    def in_step(self, step: Sequence[str], unified: Sequence[str], folder: Path, env: Mapping[str, str]) -> list[str]:
        """Return the words of a step that runs `unified` on each node, in the image if any. The command follows them.

        Args:
            step: words of srun.
            unified: the words that run the command line of this installation.
            folder: working directory of the job, which a container sees, too.
            env: environment of srun, with the user's settings for Pyxis or Apptainer.
        """
        if self.container_image:
            mounts = ",".join(filter(None, [f"{folder}:{folder}", env.get("PYXIS_CONTAINER_MOUNTS")]))
            image = [f"--container-image={self.container_image}", f"--container-mounts={mounts}"]
            return [*step, *image, f"--container-workdir={folder}", *IN_IMAGE]
        if self.apptainer:
            gpus = ["--nv"] if self.devices is None and "APPTAINER_ROCM" not in env else []
            return [*step, "apptainer", "exec", *gpus, "--bind", str(folder), self.apptainer, *IN_IMAGE]
        return [*step, *unified]


def agent_arguments(
    env: Mapping[str, str],
    *,
    master: str,
    folder: Path | None,
    devices: int | None,
    address: str | None,
    spare_from: int | None,
    group: int | None,
    until_eof: bool,
) -> list[str]:
    """Return the flags of this node's agent, with the resources that SLURM gave it, not those of the host.

    Args:
        folder: folder of the cluster, for state and logs; None: the agent's default.
        address: address at which others reach this node; None: the one towards the master.
        spare_from: nodes from this number on are in reserve.
        group: component of a heterogeneous job.
        until_eof: True if the agent leaves at the end of its stdin.
    """
    node, slurm_id = env.get("SLURMD_NODENAME", ""), env.get("SLURM_JOB_ID", "")
    if not node or not slurm_id:
        raise UsageError(
            "this process is no task of SLURM: `unified slurm exec` and `unified slurm grow` start agents."
        )
    name = node if until_eof else f"{node}-{slurm_id}"  # a node may have several single-node jobs
    labels = [f"slurm_job={slurm_id}"]
    if spare_from is not None and int(env.get("SLURM_NODEID") or 0) >= spare_from:
        labels.append("spare=true")
    words = ["--master", master, "--node-id", name, "--labels", ",".join(labels), "--leave-after", str(LEAVE_AFTER_S)]
    words += ["--key-fd", "0", *(["--leave-at-eof", "0"] if until_eof else [])]
    if group is not None:
        words += ["--resources", json.dumps({f"{HET_RESOURCE}{group}": MANY})]
    cpus = _number(env.get("SLURM_CPUS_ON_NODE", "") or env.get("SLURM_CPUS_PER_TASK", ""))
    words += ["--cpus", str(cpus)] if cpus else []
    memory_mb = _number(env.get("SLURM_MEM_PER_NODE", "")) or cpus * _number(env.get("SLURM_MEM_PER_CPU", ""))
    words += ["--memory-mb", str(memory_mb)] if memory_mb else []
    words += ["--devices", str(devices)] if devices is not None else []
    words += ["--address", address] if address is not None else []
    return words + (["--state-dir", str(folder / name)] if folder is not None else [])


def agent_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an agent and its workers: without the rank of srun's task."""
    return {name: value for name, value in env.items() if not _OF_TASKS.match(name)}


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
