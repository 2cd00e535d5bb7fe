"""The first message to a worker: its identity, its place, its devices, its peers."""

from __future__ import annotations

from collections.abc import Sequence

from unified.job.spec import JobSpec
from unified.protocol.agent_master import DesiredWorker
from unified.protocol.records import DirectoryEntry
from unified.protocol.worker_agent import Launch
from unified_agent.environment import NodeFacts, devices_of, log_path, worker_environment


def launch_of(
    wanted: DesiredWorker,
    spec: JobSpec,
    node: NodeFacts,
    *,
    neighbours: Sequence[DesiredWorker],
    num_elsewhere: int = 0,
    relay: str,
    directory: list[DirectoryEntry],
) -> Launch:
    """Return everything a worker needs to start.

    Args:
        neighbours: all that is desired on this node, itself included.
        num_elsewhere: workers of other agents of this host.
    """
    num_local_workers = sum(other.kind == "worker" for other in neighbours)
    return Launch(
        job_id=wanted.job_id,
        spec=spec,
        kind=wanted.kind,
        name=wanted.name,
        incarnation=wanted.worker_incarnation,
        role=wanted.role,
        rank=wanted.rank,
        world_size=wanted.world_size,
        local_rank=wanted.local_rank,
        local_world_size=wanted.local_world_size,
        node_rank=wanted.node_rank,
        node=node.node,
        host_id=node.host_id,
        address=node.address,
        master=node.master,
        relay=relay,
        run_dir=node.run_dir,
        log_file=log_path(node.log_dir, wanted.job_id, wanted.name, wanted.worker_incarnation, "err"),
        devices=devices_of(spec, wanted.devices, node),
        env=worker_environment(
            spec,
            wanted,
            node,
            num_local_workers=num_local_workers,
            num_host_workers=num_local_workers + num_elsewhere,
        ),
        directory=directory,
    )
