"""Needs of a job, and the sbatch script that asks SLURM for them. Pure."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from unified.errors import UsageError
from unified.job.spec import SLURM_GROUPS, JobSpec, RoleSpec, in_groups, with_nodes
from unified.slurm.allocation import NodeOptions
from unified.values import Value

SUSPEND_S = 120
"""Seconds, beyond the workers' grace, before an allocation's end: SLURM's signal may come 60 s early, or late."""
_SHORT = {
    "A": "account",
    "a": "array",
    "c": "cpus-per-task",
    "J": "job-name",
    "N": "nodes",
    "o": "output",
    "p": "partition",
    "t": "time",
}
EARLY_S = 60
"""Seconds by which SLURM may send a signal too early."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_NODES = re.compile(r"(\d+)(?:-(\d+))?")


class Slurm(Value, frozen=True, kw_only=True):
    """Wishes for an allocation, beyond what is derived from the job: nodes, GPUs, CPUs, memory.

    ::

        job.submit("sft", on=Slurm(time="12:00:00", partition="gpu", spare_nodes=1, sbatch=["--qos=high"]))
    """

    time: str = ""
    """Time limit as SLURM writes it, such as ``12:00:00`` or ``2-0``; empty: the partition's."""
    partition: str = ""
    account: str = ""
    array: str = ""
    """Array of jobs, such as ``0-9``. Each has its own cluster, whose workers have ``SLURM_ARRAY_TASK_ID`` set."""
    spare_nodes: int = 0
    """Nodes in reserve: a job that loses a node goes on with one of them."""
    requeues: int | None = None
    """Number of times that a job goes back into the queue when its time is over; None: until it has ended."""
    devices: int | None = None
    """Virtual devices of a node instead of GPUs; None: as many as a job of type CPU asks for."""
    interface: str = ""
    """Network interface whose address master and agents have, such as ``ib0``; empty: that towards the other nodes."""
    container_image: str = ""
    """Image in which Pyxis runs agents and workers. It must have the same version of Unified on its path."""
    apptainer: str = ""
    """Image in which Apptainer, instead of Pyxis, runs them."""
    groups: dict[str, list[str]] = {}
    """Roles on nodes of their own, as a component of a heterogeneous job, with options of sbatch for these nodes:
    ``{"env": ["--partition=cpu", "--nodes=2"]}``. Several roles are written with commas: ``"env,judge"``."""
    sbatch: list[str] = []
    """More options of sbatch, such as ``--qos=high``; they override the derived ones."""


class Demand(Value, frozen=True, kw_only=True):
    """Needs of a job: its number of nodes, and the needs of each node."""

    nodes: int
    """Least number of nodes."""
    max_nodes: int
    gpus: int
    """GPUs of a node."""
    cpus: int
    memory_mb: int
    """MiB of a node; 0: the job does not say."""
    devices: int | None
    """Virtual devices of a node; None: it has GPUs, or needs no devices."""
    grace_s: float


def demand(spec: JobSpec, slurm: Slurm) -> Demand:
    """Return what a job needs of each of its nodes, if its workers are spread evenly."""
    least = with_nodes(spec, 1)
    others = sum(_bounds(options(asked).get("nodes", ""))[1] for asked in slurm.groups.values())
    nodes = max(1, least.node_num - others)
    has_devices = any(role.resources.accelerator for role in spec.roles)
    virtual = spec.device_per_node if spec.accelerator_type == "CPU" and has_devices else None
    virtual = slurm.devices if slurm.devices is not None else virtual
    elsewhere = {name: 1 for names in slurm.groups for name in names.split(",")}
    in_groups(spec, elsewhere)  # raises for a role that the job does not have
    roles = [role for role in least.roles if role.name not in elsewhere]
    here = {role.name: _workers_of_a_node(role, nodes) for role in roles}
    cpus = spec.master_cpu + sum(here[role.name] * role.resources.cpu for role in roles)
    memory_mb = spec.master_memory_mb + sum(here[role.name] * role.resources.memory_mb for role in roles)
    return Demand(
        nodes=nodes,
        max_nodes=max(nodes, spec.node_num - others),
        gpus=spec.device_per_node if has_devices and virtual is None else 0,
        cpus=math.ceil(cpus) or sum(here.values()),
        memory_mb=math.ceil(memory_mb),
        devices=virtual,
        grace_s=spec.stop_grace_s + spec.save_grace_s,
    )


def _workers_of_a_node(role: RoleSpec, nodes: int) -> int:
    return math.ceil(role.num_groups / nodes) * role.per_group


def script(name: str, needs: Demand, slurm: Slurm, unified: Sequence[str], command: Sequence[str]) -> str:
    """Return the sbatch script of a job.

    Args:
        unified: the words that run the command line of this installation.
        command: the driver that submits the job, on the first node.

    Raises:
        UsageError: an option of sbatch contradicts the job.
    """
    given = options(slurm.sbatch)
    if "nodes" in given:
        _check_nodes(given["nodes"], needs, slurm)
    signal_s = math.ceil(needs.grace_s) + SUSPEND_S
    if "signal" not in given:
        _check_time(given.get("time") or slurm.time, signal_s)
    derived = {
        "job-name": name,
        "nodes": _range(needs.nodes + slurm.spare_nodes, needs.max_nodes + slurm.spare_nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(needs.gpus) if needs.gpus else "",
        "cpus-per-task": str(max(1, needs.cpus)),
        "mem": f"{needs.memory_mb}M" if needs.memory_mb else "",
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "array": slurm.array,
        "output": "%x-%A_%a.out" if slurm.array else "%x-%j.out",
        "signal": f"B:USR1@{signal_s}",
    }
    if given.keys() & {"gres", "gpus", "gpus-per-task"}:
        derived["gpus-per-node"] = ""
    if given.keys() & {"mem-per-cpu", "mem-per-gpu"}:
        derived["mem"] = ""
    lines = _directives(derived, slurm, "--no-kill", "--requeue", "--open-mode=append")
    groups: dict[str, int] = {}
    for number, (roles, asked) in enumerate(slurm.groups.items(), 1):
        groups |= dict.fromkeys(roles.split(","), number)
        group = ["--ntasks-per-node=1", *([] if "nodes" in options(asked) else ["--nodes=1"]), *asked]
        lines += ["#SBATCH hetjob", f"#SBATCH {shlex.join(group)}"]
    if groups:
        lines.append(f"export {SLURM_GROUPS}={shlex.quote(json.dumps(groups))}")
    own = ["slurm", "exec", f"--nodes={_range(needs.nodes, needs.max_nodes)}"]
    chosen = {name: getattr(slurm, name) for name in NodeOptions.__struct_fields__}
    own += NodeOptions(**(chosen | {"devices": needs.devices})).words()
    own += [f"--requeues={slurm.requeues}"] if slurm.requeues is not None else []
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join([*unified, *own, '--', *command])}", ""])


def grow_script(number: int, slurm: Slurm, unified: Sequence[str], agent: Sequence[str], key_file: str) -> str:
    """Return the script of an array of single-node jobs. Each is an agent of a cluster that exists already."""
    derived = {
        "job-name": "unified-agent",
        "array": f"0-{number - 1}",
        "nodes": "1",
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "output": "%x-%A_%a.out",
        "signal": "B:TERM@60",
    }
    command = shlex.join([*unified, "slurm", "agent", *agent]) + (f" < {shlex.quote(key_file)}" if key_file else "")
    return "\n".join(["#!/bin/bash", *_directives(derived, slurm), f"exec {command}", ""])


def _directives(derived: Mapping[str, str], slurm: Slurm, *more: str) -> list[str]:
    """Return the lines with the options of sbatch; given options override derived ones."""
    given = options(slurm.sbatch)
    lines = [f"--{option}={shlex.quote(value)}" for option, value in derived.items() if value and option not in given]
    return [f"#SBATCH {line}" for line in [*lines, *more, *([shlex.join(slurm.sbatch)] if slurm.sbatch else [])]]


def options(words: Sequence[str]) -> dict[str, str]:
    """Return sbatch's options by their long names, with values from the same or the next word."""
    found: dict[str, str] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last, _, value = word[2:].partition("=")
            found[last] = value
        elif word.startswith("-") and len(word) > 1:
            last = _SHORT.get(word[1], word[1])
            found[last] = word[2:].strip(" =")
        elif last:
            found[last] = found[last] or word
    return found


def _check_nodes(text: str, needs: Demand, slurm: Slurm) -> None:
    if 0 < _bounds(text)[1] < needs.nodes + slurm.spare_nodes:
        spare = f" and {slurm.spare_nodes} in reserve" if slurm.spare_nodes else ""
        raise UsageError(f"--nodes={text} is too few: the job needs {needs.nodes} nodes{spare}. Leave the option out.")


def _check_time(text: str, signal_s: int) -> None:
    limit = _TIME.fullmatch(text)
    if limit is None:
        return  # the limit is the partition's, or sbatch will refuse it
    days, first, second, third = (int(found or 0) for found in limit.groups())
    parts = (first, second, third) if limit[1] or limit[4] else (0, first, second)
    limit_s = days * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]
    if limit_s < signal_s + EARLY_S:
        raise UsageError(
            f"the time limit {text} is too short: {signal_s} to {signal_s + EARLY_S} s before its end the job is asked "
            "to save, and goes back into the queue. Give more time, or lower stop_grace_s and save_grace_s of the job, "
            "or choose the signal: --sbatch=--signal=B:USR1@60."
        )


def check_sizes(needs: Demand, slurm: Slurm, sizes: Mapping[str, int], default: str, env: Mapping[str, str]) -> None:
    """Check that each partition has as many nodes as are asked for. Otherwise the job might wait for ever in SLURM.

    Args:
        sizes: number of nodes by partition, as far as known.
        default: partition of requests that name none.
        env: environment of sbatch, whose variables override its script.

    Raises:
        UsageError: a partition has too few nodes.
    """
    given = options(slurm.sbatch)
    if given.keys() & {"clusters", "M"} or env.keys() & {"SBATCH_CLUSTERS", "SLURM_CLUSTERS"}:
        return  # `sizes` is about this cluster alone
    own = {"partition": slurm.partition, "nodes": str(needs.nodes + slurm.spare_nodes), **given}
    for asked in (own, *(options(words) for words in slurm.groups.values())):
        number = _bounds(asked.get("nodes", ""))[0]
        names = (env.get("SBATCH_PARTITION") or asked.get("partition") or default).split(",")
        largest = max(names, key=lambda name: sizes.get(name, number))
        if (size := sizes.get(largest, number)) < number:
            raise UsageError(
                f"partition {largest!r} has {size} node{'s' if size != 1 else ''}, and {number} are asked for: the job "
                "would wait for ever. Name another partition with -p, or ask for fewer nodes."
            )


def _range(least: int, most: int) -> str:
    return f"{least}-{most}" if most > least else f"{least}"


def _bounds(nodes: str) -> tuple[int, int]:
    """Return the least and the most nodes that an option of sbatch asks for: 1 without it, 0 if written another way."""
    match = _NODES.fullmatch(nodes or "1")
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
