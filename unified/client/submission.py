"""Submitting a job: to the master that was named, or to an embedded cluster of its own."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from typing import TYPE_CHECKING

from msgspec import structs

from unified.client.connection import MasterConnection, connect_to
from unified.client.handle import JobHandle
from unified.client.terminal import ending_at_once, is_watched
from unified.config.addresses import find_master
from unified.devices import has_accelerator
from unified.job.spec import JobSpec, RoleSpec, with_nodes
from unified.protocol.client_master import Accepted, ListNodes, NodeList, NodeStatus, SubmitJob

if TYPE_CHECKING:
    from unified.client.output import Prefix


def submit_job(spec: JobSpec, *, master: str | None = None, wait: bool = True, joins: bool = False) -> JobHandle:
    """Submit a job and return at once.

    Args:
        master: ``tcp://HOST:PORT``; None means ``UNIFIED_MASTER``, and without that an embedded cluster of
            `spec.node_num` agents with `spec.device_per_node` virtual devices each, which ends with the job. (For a
            range of nodes it has as many as the lower end. A GPU job for one node, on a host that has accelerators,
            gets the real ones.) Its workers share the host's CPUs, however many they ask for.
        wait: let a job that does not fit now wait for its place; False has it refused, and so has an embedded cluster,
            where no place can come free.
        joins: where a job of this name with the same workers runs already, be in front of that one instead.

    Raises:
        RefusedError: the master did not take it, or refused this side's cluster key; the message says why.
        MasterUnreachableError: no master answers there.
        ClusterError: the embedded cluster could not be started.
        KeyFileError: the cluster key cannot be read, or others may read it.
    """
    return _hand_over(_with_own_folders(spec), master, wait, joins)


def run_job(
    spec: JobSpec, *, master: str | None = None, wait: bool = True, joins: bool = False, prefix: Prefix = "always"
) -> int:
    """Submit a job as `submit_job` does, and show progress and output until it has ended.

    Ctrl-C or SIGTERM stops the job in order, a second one ends it, and this process, at once (`SystemExit`).

    Args:
        prefix: whether each line of a worker has its name in front: ``always``, ``never``, or ``auto``, on a terminal.

    Returns:
        The exit code: 0, 1 for a failure, 130 for a stop by the user, 143 for one by SIGTERM.
    """
    spec = _with_own_folders(spec)
    if not is_watched():
        spec = structs.replace(spec, is_output_followed=True)
    with ending_at_once():  # where there is no job yet to be stopped in order, or none any more
        handle = _hand_over(spec, master, wait, joins)
        from unified.client.foreground import run_in_foreground  # the master need not wait for its import

        return run_in_foreground(handle, prefix, spec)


def _with_own_folders(spec: JobSpec) -> JobSpec:
    return structs.replace(spec, roles=[with_own_folder(role) for role in spec.roles])


def with_own_folder(role: RoleSpec) -> RoleSpec:
    """The role, whose files go to a folder that no earlier run has written to."""
    files = role.output_files
    if files is None or not files.is_written:
        return role
    log_dir = files.log_dir or tempfile.mkdtemp(prefix="torchelastic_")
    for name in itertools.chain([files.run_id], (f"{files.run_id}_{number}" for number in itertools.count(2))):
        try:
            os.makedirs(f"{log_dir}/{name}")
        except FileExistsError:
            continue
        except OSError:  # it need not be there, nor writable, on this host
            pass
        break
    return structs.replace(role, output_files=structs.replace(files, log_dir=log_dir, run_id=name))


def cluster_nodes(master: str) -> list[NodeStatus]:
    """The nodes that a master knows."""
    with connect_to(master) as connection:
        return connection.ask(ListNodes(), NodeList).nodes


def _hand_over(spec: JobSpec, master: str | None, wait: bool, joins: bool) -> JobHandle:
    address = find_master(master)
    if address is None:
        return _send_embedded(spec)
    connection = connect_to(address)
    try:
        return JobHandle(connection, _submit(connection, spec, wait, joins))
    except BaseException:
        connection.close()
        raise


def _submit(connection: MasterConnection, spec: JobSpec, wait: bool, joins: bool) -> str:
    """The id of the job, or of the one that it joins."""
    accepted = connection.ask(SubmitJob(spec=spec, wait=wait, joins=joins), Accepted)
    if accepted.submitted_by:
        print(f"{accepted.job_id}  was submitted by {accepted.submitted_by}; this command joins it", file=sys.stderr)
    return accepted.job_id


def _send_embedded(spec: JobSpec) -> JobHandle:
    from unified.client.embedded import EmbeddedCluster

    least = with_nodes(spec, 1)
    # One agent may have the host's real devices; several would each take all of them.
    is_real = spec.accelerator_type == "GPU" and least.node_num == 1 and has_accelerator()
    cpus = spec.master_cpu + sum(role.total * role.resources.cpu for role in least.roles)
    cluster = EmbeddedCluster(
        least.node_num,
        None if is_real else spec.device_per_node,
        cpus_per_node=max(cpus, len(os.sched_getaffinity(0))) if cpus else None,
        max_master_restarts=spec.master_max_restart,
    )
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"starting an embedded cluster; its logs: {cluster.home}", file=sys.stderr)
    cluster.start()
    connection = connect_to(cluster.address)
    try:
        return JobHandle(connection, _submit(connection, spec, wait=False, joins=False), cluster=cluster)
    except BaseException:
        connection.close()
        cluster.stop(timeout_s=1.0)
        raise
