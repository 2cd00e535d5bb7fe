"""Identity of a bus endpoint: the incarnation of a worker that it belongs to, and how it reaches the network."""

from __future__ import annotations

from typing import NamedTuple

from unified.protocol.envelope import BUS_VERSION, Envelope, Kind
from unified.security.keys import ClusterKey


class BusIdentity(NamedTuple):
    """One incarnation of one worker, as its messages and its log lines name it."""

    job: str
    worker: str
    incarnation: int
    node: str
    host: str
    """Id that is equal for processes that can connect to one another's Unix sockets."""
    inbox: str = ""
    """Id of this incarnation's inbox; empty before the endpoint starts."""

    def envelope(self, kind: Kind, target: str, call_id: int = 0, method: str = "", *, count: int = 0) -> Envelope:
        """Make the envelope of a message from here to the inbox `target`."""
        return Envelope(BUS_VERSION, kind, call_id, self.inbox, self.worker, target, method, job=self.job, count=count)


class BusNetwork(NamedTuple):
    """Addresses and key of a bus endpoint."""

    run_dir: str
    """Folder of the Unix socket; empty: none."""
    address: str
    """Address of this host for others; empty: no tcp."""
    relay: str = ""
    """Address of the bus relay; empty: none."""
    route: str = "auto"
    """``auto``, ``tcp`` or ``relay``; ``UNIFIED_BUS_ROUTE`` overrides ``auto``."""
    key: ClusterKey | None = None
    """Key that other hosts and the relay have to prove, as does this process; None: plain connections."""
