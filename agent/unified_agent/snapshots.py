"""The agent's end of the node's snapshot server, a process that starts when the first worker connects to its socket.

The agent owns the sockets. So a dead server is replaced when a worker connects again, or another node's server that
brings a copy.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import structs

from unified import process
from unified.config.ports import bind_free
from unified.errors import UsageError
from unified.protocol import snapshots
from unified.protocol.agent_master import DesiredJob
from unified.security.curve import new_key
from unified.security.keys import ClusterKey
from unified_agent.core.messages import SnapshotsReported
from unified_agent.environment import NodeFacts
from unified_agent.helper_process import HelperProcess
from unified_agent.poll_loop import PollLoop
from unified_agent.processes import Processes
from unified_agent.spawn import MARKER_SNAPSHOTS, spawn

log = logging.getLogger("unified_agent")
CLOSE_S = 2.0
SETTLED_S = 5.0
"""A server that ends younger than this may fail again: after the second in a row, waiting connections are closed."""
_BACKLOG = 128


class SnapshotProcess:
    """The snapshot server of this node, while there is one, and the sockets whose connections start it."""

    def __init__(
        self,
        loop: PollLoop,
        processes: Processes,
        facts: NodeFacts,
        env: Mapping[str, str],
        *,
        key: ClusterKey | None,
        quota_mb: float,
        linger_s: float,
        on_event: Callable[[SnapshotsReported], None],
    ) -> None:
        self._loop = loop
        self._on_event = on_event
        self._processes = processes
        self._run_dir = Path(facts.run_dir)
        self._env = {**env, MARKER_SNAPSHOTS: "1"}
        self._peers = _listen_for_peers(facts.address)
        url = "" if self._peers is None else _url(facts.address, self._peers.getsockname()[1])
        pair = None if key is None else new_key()
        self.host = snapshots.SnapshotHost(url, secrets.token_bytes(32), "" if pair is None else pair.public)
        self._others = snapshots.NameCopyNodes({})
        self._order = snapshots.ServeSnapshots(
            node=facts.node,
            host=self.host,
            quota_bytes=int(quota_mb * (1 << 20)),
            linger_s=linger_s,
            key=key,
            pair=pair,
        )
        self._server: HelperProcess | None = None
        self._num_short_lived = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._run_dir / snapshots.LISTENER_NAME))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._await_first()

    def token(self, job_id: str) -> str:
        return snapshots.token_of(self.host.secret, job_id)

    def note_copy_nodes(self, jobs: Iterable[DesiredJob]) -> None:
        """Tell the server which other nodes hold snapshots of jobs here, if that has changed."""
        jobs = list(jobs)
        copy_nodes = {job.job_id: job.copy_node for job in jobs if job.copy_node is not None}
        others = snapshots.NameCopyNodes(
            copy_nodes, {job.job_id: job.earlier_nodes for job in jobs if job.earlier_nodes}
        )
        if others != self._others:
            self._others = others
            if self._server is not None:
                self._server.channel.send(others)

    def replace_key(self, key: ClusterKey) -> None:
        """Tell the server that the cluster's key has a successor."""
        self._order = structs.replace(self._order, key=key)
        if self._server is not None:
            self._server.channel.send(snapshots.ReplaceKey(key))

    def persist(self) -> None:
        """Let the server write its snapshots to the storage of their jobs, if any; an event reports the end."""
        if self._server is None:
            self._on_event(SnapshotsReported(is_to_persist=False))
        else:
            self._server.channel.send(snapshots.PersistSnapshots())

    def close(self) -> None:
        """End the server; its memory is gone with it."""
        for listener in self._listeners():
            self._loop.unwatch(listener.fileno())
            listener.close()
        if self._server is not None:
            self._processes.forget_helper(self._server.pid)
            self._hang_up(self._server)
            self._server.await_end(time.monotonic() + CLOSE_S)

    def _listeners(self) -> list[socket.socket]:
        return [self._listener] if self._peers is None else [self._listener, self._peers]

    def _await_first(self) -> None:
        for listener in self._listeners():
            self._loop.watch(listener.fileno(), self._start)

    def _start(self) -> None:
        """Start the server, which accepts the waiting connection itself."""
        descriptors = [listener.fileno() for listener in self._listeners()]
        try:
            self._server = server = HelperProcess(
                spawn(
                    sys.executable,
                    "unified.snapshot.server",
                    [*map(str, descriptors)],
                    log=self._run_dir / "snapshots.log",
                    env=self._env,
                    descriptors=descriptors,
                )
            )
        except OSError as error:
            log.error("event=snapshots-not-started reason=%r", str(error))
            self._turn_away()
            return
        for descriptor in descriptors:
            self._loop.unwatch(descriptor)
        self._loop.watch_channel(server.channel, lambda: self._hear(server))
        server.channel.send(self._order)
        server.channel.send(self._others)
        self._processes.add_helper(server.pid, self._on_end)
        log.info("event=snapshots-started pid=%d quota_mb=%d", server.pid, self._order.quota_bytes >> 20)

    def _hear(self, server: HelperProcess) -> None:
        for body in server.channel.receive():
            kept = snapshots.snapshots_to_agent.decode(body)
            if not kept.is_to_persist:
                log.info("event=snapshots-persisted number=%d", kept.num_written)
            self._on_event(SnapshotsReported(is_to_persist=kept.is_to_persist))
        if not server.channel.is_open:  # SIGCHLD reports its end
            self._loop.unwatch_channel(server.channel)

    def _on_end(self, code: int) -> None:
        """Handle the server's end, and wait for the next connection, which starts another server."""
        assert self._server is not None
        server, self._server = self._server, None
        server.reaped(code)
        self._hang_up(server)
        log.warning(
            "event=snapshots-ended reason=%r: its snapshots are lost; %s",
            process.describe_end(code),
            server.last_words(),
        )
        self._num_short_lived = self._num_short_lived + 1 if server.age_s < SETTLED_S else 0
        if self._num_short_lived > 1:
            self._turn_away()
        self._on_event(SnapshotsReported(is_to_persist=False))
        self._await_first()

    def _turn_away(self) -> None:
        """Close the waiting connections, so that they do not start another server that fails at once."""
        for listener in self._listeners():
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

    def _hang_up(self, server: HelperProcess) -> None:
        self._loop.unwatch_channel(server.channel)
        server.close()


def _listen_for_peers(address: str) -> socket.socket | None:
    """Return a socket for the servers of other nodes; None, with a warning, if the address cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = bind_free(lambda port: socket.create_server((address, port), family=family))
    except (OSError, UsageError) as error:
        text = f"{address} cannot be listened on ({error}): this node neither sends nor receives copies"
        log.warning("event=snapshots-unreachable reason=%r", text)
        return None
    listener.setblocking(False)
    return listener


def _url(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
