"""Submitting a job: to the master that was named, or to an embedded cluster of its own."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal, overload

from unified import settings
from unified.client.address import connect_seconds, find_master
from unified.client.connection import MasterConnection
from unified.client.handle import JobHandle
from unified.client.signals import ending_at_once
from unified.job.spec import JobSpec
from unified.keys import find_key
from unified.protocol.client_master import Accepted, SubmitJob

if TYPE_CHECKING:
    from unified.client.embedded import EmbeddedCluster


@overload
def submit_job(
    spec: JobSpec, *, master: str | None = None, blocking: Literal[True] = True, wait: bool = True
) -> int: ...


@overload
def submit_job(
    spec: JobSpec, *, master: str | None = None, blocking: Literal[False], wait: bool = True
) -> JobHandle: ...


@overload
def submit_job(spec: JobSpec, *, master: str | None = None, blocking: bool, wait: bool = True) -> int | JobHandle: ...


def submit_job(
    spec: JobSpec, *, master: str | None = None, blocking: bool = True, wait: bool = True
) -> int | JobHandle:
    """Submit a job.

    Args:
        master: ``tcp://HOST:PORT``; None means ``UNIFIED_MASTER``, and without that an embedded cluster of
            `spec.node_num` agents with `spec.device_per_node` virtual devices each, which ends with the job. (A GPU
            job for one node, on a host that has accelerators, gets the real ones.) Its workers share the host's CPUs,
            however many they ask for.
        blocking: show progress and output until the job has ended. Ctrl-C or SIGTERM stops it in order, a second one
            ends it, and this process, at once (`SystemExit`).
        wait: let a job that does not fit now wait for its place; False has it refused, and so has an embedded cluster,
            where no place can come free.

    Returns:
        The exit code (0, 1 for a failure, 130 for a stop by the user, 143 for one by SIGTERM) if `blocking`, else a
        handle.

    Raises:
        RefusedError: the master did not take it, or refused this side's cluster key; the message says why.
        MasterUnreachableError: no master answers there.
        ClusterError: the embedded cluster could not be started.
        KeyFileError: the cluster key cannot be read, or others may read it.
    """
    if not blocking:
        return _hand_over(spec, master, wait)
    with ending_at_once():  # where there is no job yet to be stopped in order, or none any more
        handle = _hand_over(spec, master, wait)
        from unified.client.foreground import run_in_foreground

        return run_in_foreground(handle)


def _hand_over(spec: JobSpec, master: str | None, wait: bool) -> JobHandle:
    address = find_master(master)
    return _send(spec, address, wait) if address is not None else _send_embedded(spec)


def _send(spec: JobSpec, address: str, wait: bool, cluster: EmbeddedCluster | None = None) -> JobHandle:
    connection = MasterConnection(address, key=find_key(address), timeout_s=connect_seconds())
    try:
        accepted = connection.ask(SubmitJob(spec=spec, wait=wait), Accepted)
    except BaseException:
        connection.close()
        raise
    return JobHandle(connection, accepted.job_id, cluster=cluster)


def _send_embedded(spec: JobSpec) -> JobHandle:
    from unified.client.embedded import EmbeddedCluster

    # One agent may have the host's real devices; several would each take all of them.
    is_real = spec.accelerator_type == "GPU" and spec.node_num == 1 and settings.has_accelerator()
    cpus = sum(role.total * role.resources.cpu for role in spec.roles)
    cluster = EmbeddedCluster(
        spec.node_num,
        None if is_real else spec.device_per_node,
        cpus_per_node=max(cpus, len(os.sched_getaffinity(0))) if cpus else None,
        max_master_restarts=spec.master_max_restart,
    )
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"starting an embedded cluster; its logs: {cluster.home}", file=sys.stderr)
    cluster.start()
    try:
        return _send(spec, cluster.address, wait=False, cluster=cluster)
    except BaseException:
        cluster.stop(timeout_s=1.0)
        raise
