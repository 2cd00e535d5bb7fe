"""`unified.local_cluster()`: a cluster on this host for the jobs of this process, for a block or a session."""

from __future__ import annotations

from typing import Self

from unified.client.embedded import EmbeddedCluster
from unified.config import addresses
from unified.devices import VIRTUAL_DEVICES, has_accelerator

MAX_RESTARTS = 5


class SessionCluster(EmbeddedCluster):
    """A running cluster that `submit` and `connect` of this process use by default, until `stop`.

    It ends with its ``with`` block, with `stop`, or with this process, also if that is killed. Its jobs end with it.
    """

    def __repr__(self) -> str:
        state = f"at {self.address}" if self.address in addresses.own_masters else "stopped"
        return f"<unified.local_cluster {state}, {len(self.node_names)} node(s); logs: {self.home}>"

    def start(self, timeout_s: float | None = None) -> Self:
        """Start the cluster. Returns at once if it runs already, because `local_cluster` has started it."""
        if not self.address:
            super().start(timeout_s)
            addresses.own_masters.append(self.address)
        return self

    def stop(self, timeout_s: float = 15.0) -> None:
        """End the cluster and its jobs. Safe to call twice; it cannot be started again."""
        if self.address in addresses.own_masters:
            addresses.own_masters.remove(self.address)
        super().stop(timeout_s)


def local_cluster(nodes: int = 1, devices: int | None = None, cpus: float | None = None) -> SessionCluster:
    """Start a cluster on this host and return when it is ready. Jobs that this process submits then go there.

        with unified.local_cluster():  # or cluster = unified.local_cluster(), and cluster.stop() at the end
            job.submit("first")

    Args:
        nodes: number of nodes, each with an agent of its own on this host.
        devices: virtual devices of each node. None: the accelerators of this host if there is one node, else 8.
        cpus: cores that each node offers; None: those that this process may use.

    Raises:
        ClusterError: a daemon ended; the message has its last words.
    """
    if devices is None and not (nodes == 1 and has_accelerator()):
        devices = VIRTUAL_DEVICES
    return SessionCluster(nodes, devices, cpus_per_node=cpus, max_master_restarts=MAX_RESTARTS).start()
