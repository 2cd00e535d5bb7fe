"""Judgement of facts about a host and its cluster: whether they are fine, and what to do if not. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial

from unified.config.mounts import NETWORK
from unified.errors import listed
from unified.security.keys import is_loopback
from unified.values import Value

MIB, GIB = 2**20, 2**30
LEAST_SHM, LEAST_DISK, ENOUGH_DISK = 1 * GIB, 256 * MIB, 2 * GIB
SLOW_NAME_S, NOTED_SKEW_S, WRONG_SKEW_S = 1.0, 1.0, 10.0
SLOW_NAMES = (
    "A name server of /etc/resolv.conf does not answer: remove it, or name all hosts in /etc/hosts. torch's TCPStore "
    "looks up its peers at each rendezvous, which then takes 10 to 20 s."
)


class Severity(StrEnum):
    """Severity of a finding. `note`: it works, but costs something. `wrong`: jobs fail, hang or are slow."""

    FINE = "fine"
    NOTE = "note"
    WRONG = "wrong"
    UNTESTED = "untested"


class Finding(Value, frozen=True):
    """Outcome of one check of `unified doctor`: facts in a sentence or less, and advice if there is any."""

    severity: Severity
    what: str
    advice: str = ""
    check: str = ""


fine, note, wrong, untested = (partial(Finding, severity) for severity in Severity)


def name_lookup(name: str, addresses: Sequence[str], seconds: float, error: str, *, is_own: bool = False) -> Finding:
    if seconds >= SLOW_NAME_S:
        return wrong(f"the lookup of {name} took {seconds:.1f} s{f' and failed: {error}' if error else ''}", SLOW_NAMES)
    if error:
        return wrong(f"{name} cannot be looked up: {error}", f"Add {name} to DNS or to /etc/hosts.")
    if is_own and all(map(is_loopback, addresses)):
        advice = f"Give {name} in /etc/hosts the address that other hosts reach, or name a master here by that address."
        return note(f"{name} is {listed(addresses, 3)}: loopback, by which no other host reaches this one", advice)
    return fine(f"{name} is {listed(addresses, 3)}")


def shared_memory(path: str, kind: str, is_writable: bool, total: int, free: int, num_inodes: int) -> Finding:
    text = f"{path}: {size(free)} of {size(total)} free"
    if not is_writable or kind not in ("tmpfs", "ramfs", ""):
        return wrong(f"{path} cannot be written, or is not in memory ({kind})", "Mount a tmpfs there, with mode 1777.")
    if total < LEAST_SHM:
        advice = (
            "NCCL and data loaders then die of a bus error: docker's --shm-size=16g, Kubernetes' emptyDir of medium"
        )
        return wrong(text, f"{advice} Memory, or `mount -o remount,size=50% {path}`.")
    is_low = free < total / 10 or not num_inodes
    return note(text, f"`ls -l {path}` shows whose files fill it.") if is_low else fine(text)


def folder(path: str, kind: str, is_writable: bool, total: int, free: int, num_inodes: int) -> Finding:
    text = f"{path}: {size(free)} of {size(total)} free, {kind}{'' if num_inodes else ', no inode left'}"
    elsewhere = "Choose another folder with UNIFIED_HOME, --state-dir or --log-dir."
    if not is_writable:
        return wrong(f"{path} cannot be written", elsewhere)
    if free < LEAST_DISK or not num_inodes:
        return wrong(text, f"Make room: a master that cannot write stops, and output is lost. {elsewhere}")
    if kind in NETWORK:
        advice = "The master's file has a rollback journal there, which is slower: a local --state-dir is better."
        return note(f"{text}, a network file system", advice)
    return note(text, f"Workers' output may fill it. {elsewhere}") if free < ENOUGH_DISK else fine(text)


def locked_memory(limit: int, rdma: Sequence[str], *, is_privileged: bool) -> Finding:
    text = f"`ulimit -l` is {size(limit) if limit >= 0 else 'unlimited'}"
    if not rdma or limit < 0 or is_privileged:
        return fine(text)
    ways = (
        "LimitMEMLOCK=infinity of a unit, docker's --ulimit memlock=-1, SLURM's PropagateResourceLimitsExcept=MEMLOCK"
    )
    return wrong(f"{text}, too little for {listed(rdma, 3)}", f"NCCL fails (ibv_reg_mr). Remove the limit: {ways}.")


def torch(version: str, toolkit: str, is_available: bool, num_gpus: int, warning: str) -> Finding:
    """Judge torch and its CUDA or ROCm (empty: a build for CPUs), given the NVIDIA GPUs that this process may use."""
    if num_gpus and not toolkit:
        return wrong(f"torch {version} is a build for CPUs, and there are {num_gpus} GPUs", "Install a build for CUDA.")
    if num_gpus and not is_available:
        advice = f"Update the driver, or install a build for an older CUDA than {toolkit}. {warning}"
        return wrong(f"torch {version} finds none of {num_gpus} GPUs", advice)
    return fine(f"torch {version}")


def clock(ahead_s: float, error_s: float) -> Finding:
    """Judge how far this clock is ahead of the master's; `error_s` is the greatest error of that figure."""
    text, skew = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the master's", abs(ahead_s) - error_s
    if skew < NOTED_SKEW_S:
        return fine(text)
    make = note if skew < WRONG_SKEW_S else wrong
    return make(text, "Start chrony or systemd-timesyncd: times of logs do not compare, and S3 refuses requests.")


def own_address(address: str, others: Sequence[str]) -> Finding:
    """Judge the address that an agent here would tell other nodes; `others` are the addresses of those nodes."""
    beyond = [other for other in others if not is_loopback(other)]
    if not (is_loopback(address) and beyond):
        return fine(f"an agent here tells others {address}")
    advice = "Name the master by the address that other hosts reach, or give the agent here --address."
    return wrong(f"an agent here would tell others {address}, and there are nodes at {listed(beyond, 3)}", advice)


def ports(unreached: Mapping[str, str], num_tried: int, num_others: int) -> Finding:
    """Judge attempts to connect to the relay and to nodes on other hosts; `unreached` has the failures by name."""
    nodes = f"{num_tried} of {num_others} nodes on other hosts"
    if not unreached:
        return fine(f"the relay and {nodes} are reached")
    which = listed(f"{who} ({why})" for who, why in unreached.items())
    advice = "Open UNIFIED_PORT_RANGE and the relay's port between all nodes; for NCCL and Gloo, all ports."
    return wrong(f"{len(unreached)} are not reached, of the relay and {nodes}: {which}", advice)


def size(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
