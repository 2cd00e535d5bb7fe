"""Submission of a job: to the master that was named, or to an embedded cluster of its own."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from unified.client.connection import connect_to
from unified.client.handle import JobHandle
from unified.client.preload import guess, own_modules
from unified.client.terminal import PASSED_ON, ending_at_once, is_watched
from unified.config.addresses import find_master
from unified.config.settings import python_path
from unified.devices import has_accelerator
from unified.job.driver import WORKING_DIR
from unified.job.spec import SLURM_GROUPS, JobSpec, RoleSpec, in_groups, with_nodes
from unified.protocol.client_master import Accepted, ListNodes, NodeList, NodeStatus, SubmitJob
from unified.protocol.framing import check_sendable

if TYPE_CHECKING:
    from unified.client.code.archive import CodeArchive
    from unified.client.embedded import EmbeddedCluster
    from unified.client.output import Prefix

begun: list[EmbeddedCluster] = []
"""A cluster that a command began to start before it knew its job. Used if the job goes to no running cluster."""


def submit_job(
    spec: JobSpec,
    *,
    master: str | None = None,
    wait: bool = True,
    joins: bool = False,
    archive: CodeArchive | None = None,
) -> JobHandle:
    """Submit a job and return at once.

    Args:
        master: ``tcp://HOST:PORT``; None means ``UNIFIED_MASTER``, and without that the cluster of ``unified up``.
            Without either, or with ``local``, the job gets an embedded cluster that ends with it: `spec.node_num`
            agents (for a range: its lower end) with `spec.device_per_node` virtual devices each. A GPU job for one
            node, on a host that has accelerators, gets the real ones. The workers share the host's CPUs, no matter
            how many they ask for.
        wait: let a job that does not fit now wait for its resources. With False it is refused. An embedded cluster
            always refuses it, because no resources can come free.
        joins: if a job of this name with the same workers runs already, return a handle on that job instead.
        archive: code that travels with the job.

    Raises:
        UsageError: the job has a value that cannot be sent.
        RefusedError: the master refused the job, or this side's cluster key; the message says why.
        MasterUnreachableError: no master answers there.
        ClusterError: the embedded cluster could not be started.
        KeyFileError: the cluster key cannot be read, or others may read it.
    """
    return _hand_over(_with_own_paths(spec), master, wait, joins, archive)


def run_job(
    spec: JobSpec,
    *,
    master: str | None = None,
    wait: bool = True,
    joins: bool = False,
    prefix: Prefix = "always",
    archive: CodeArchive | None = None,
    passed_on: Collection[int] = (),
) -> int:
    """Submit a job as `submit_job` does, and show progress and output until it has ended.

    Ctrl-C or SIGTERM stops the job in order. A second one ends the job and this process at once (`SystemExit`).
    SIGUSR1, SIGUSR2, SIGHUP and the signals in `passed_on` go to the workers that handle them, unless this process
    handles them itself.

    Args:
        prefix: whether each line of a worker has its name in front: ``always``, ``never``, or ``auto``: on a terminal,
            or with several workers.

    Returns:
        The exit code: 0, 1 for a failure, 130 for a stop by the user, 143 for one by SIGTERM.
    """
    spec = _with_own_paths(spec)
    if not is_watched():
        spec = structs.replace(spec, is_output_followed=True)
    passed_on = PASSED_ON.union(passed_on)
    with ending_at_once(passed_on):  # for signals before there is a job, and after its end
        handle = _hand_over(spec, master, wait, joins, archive)
        from unified.client.foreground import run_in_foreground  # the master need not wait for its import

        return run_in_foreground(handle, prefix, spec, passed_on)


def _with_own_paths(spec: JobSpec) -> JobSpec:
    roles = [structs.replace(role, envs={**role.envs, **python_path(role.envs)}) for role in spec.roles]
    return structs.replace(spec, roles=[with_own_folder(role) for role in roles])


def with_own_folder(role: RoleSpec) -> RoleSpec:
    """Return the role with a folder for its files that no earlier run has written to."""
    files = role.output_files
    if files is None or not files.is_written:
        return role
    log_dir = files.log_dir or tempfile.mkdtemp(prefix="torchelastic_")
    for name in itertools.chain([files.run_id], (f"{files.run_id}_{number}" for number in itertools.count(2))):
        try:
            os.makedirs(f"{log_dir}/{name}")
        except FileExistsError:
            continue
        except OSError:  # the folder may exist, or be writable, on the nodes alone
            pass
        break
    return structs.replace(role, output_files=structs.replace(files, log_dir=log_dir, run_id=name))


def cluster_nodes(master: str) -> list[NodeStatus]:
    with connect_to(master) as connection:
        return connection.ask(ListNodes(), NodeList).nodes


def _hand_over(spec: JobSpec, master: str | None, wait: bool, joins: bool, archive: CodeArchive | None) -> JobHandle:
    if archive is not None:
        spec = _with_code(spec, archive)
    if groups := os.environ.get(SLURM_GROUPS):
        spec = in_groups(spec, msgspec.json.decode(groups, type=dict[str, int]))
    check_sendable(spec)
    address = find_master(master)
    cluster = begun.pop() if begun else None
    if cluster is not None and (address is not None or cluster.environ != dict(os.environ)):
        cluster.stop(timeout_s=0.0)  # its daemons have another environment
        cluster = None
    if address is None:
        cluster = _started(spec, cluster)
        address, wait = cluster.address, False
    connection = connect_to(address)
    try:
        if archive is not None:
            from unified.client.code.transfer import upload

            upload(connection, archive)
        # A driver that SLURM has started again joins the job that it submitted before.
        joins = joins or bool(os.environ.get("SLURM_RESTART_COUNT"))
        accepted = connection.ask(SubmitJob(spec=spec, wait=wait, joins=joins), Accepted)
        if accepted.submitted_by:
            by = accepted.submitted_by
            print(f"{accepted.job_id}  was submitted by {by}; this command joins it", file=sys.stderr)
        return JobHandle(connection, accepted.job_id, cluster=cluster)
    except BaseException:
        connection.close()
        if cluster is not None:
            cluster.stop(timeout_s=1.0)
        raise


def _with_code(spec: JobSpec, archive: CodeArchive) -> JobSpec:
    """Return the job with its code. Paths into the code have no links, because nodes could not follow them."""
    from unified.client.code.archive import real_path

    root, roles = archive.code.root, []
    for role in spec.roles:
        entry, envs = role.entry_point, dict(role.envs)
        if entry.kind in ("script", "program"):
            entry = structs.replace(entry, target=real_path(entry.target, root))
        if WORKING_DIR in envs:
            envs[WORKING_DIR] = real_path(envs[WORKING_DIR], root)
        if path := envs.get("PYTHONPATH"):
            envs["PYTHONPATH"] = os.pathsep.join(real_path(entry, root) for entry in path.split(os.pathsep))
        roles.append(structs.replace(role, entry_point=entry, envs=envs))
    return structs.replace(
        spec,
        code=archive.code,
        roles=roles,
        working_dir=spec.working_dir and real_path(spec.working_dir, root),
        sys_path=[real_path(path, root) for path in spec.sys_path],
    )


def _started(spec: JobSpec, cluster: EmbeddedCluster | None) -> EmbeddedCluster:
    """Start a cluster of the job's size: the one that was begun, or a new one."""
    if cluster is None:
        from unified.client.embedded import EmbeddedCluster

        cluster = EmbeddedCluster()
        cluster.preload, cluster.modules = guess(spec), own_modules(spec)
    least = with_nodes(spec, 1)
    # One agent may have the host's real devices; several would each take all of them.
    is_real = spec.accelerator_type == "GPU" and least.node_num == 1 and has_accelerator()
    cpus = spec.master_cpu + sum(role.total * role.resources.cpu for role in least.roles)
    cluster.set_nodes(least.node_num)
    cluster.devices_per_node = None if is_real else spec.device_per_node
    cluster.cpus_per_node = max(cpus, len(os.sched_getaffinity(0))) if cpus else None
    cluster.max_master_restarts = spec.master_max_restart
    if sys.stderr is not None and sys.stderr.isatty():
        print("starting a cluster for this job (2 s); `unified up` keeps one", file=sys.stderr)
    return cluster.start()
