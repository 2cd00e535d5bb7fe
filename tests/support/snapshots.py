"""Real snapshot servers, without agents, and workers that talk to them."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from unified.protocol.framing import StreamBuffer, encode_stream
from unified.protocol.snapshots import (
    LISTENER_NAME,
    AttachSeries,
    CommitSnapshot,
    HeldSnapshot,
    NameCopyNodes,
    PersistSnapshots,
    ServerAddress,
    ServeSnapshots,
    SnapshotHost,
    SnapshotSeries,
    SnapshotSource,
    SnapshotStamp,
    StorageTarget,
    snapshots_to_agent,
    token_of,
)
from unified.security.curve import new_key
from unified.security.keys import ClusterKey
from unified.snapshot.server.__main__ import AgentConnection
from unified.snapshot.server.server import SnapshotServer
from unified.snapshot.worker.client import SnapshotClient
from unified.snapshot.worker.image import StateImage, read_state

SECRET = b"s" * 32


class SnapshotNode:
    """One node's server, as its agent would start it."""

    def __init__(
        self, folder: Path, node: str, *, quota_mb: int = 256, key: ClusterKey | None = None, linger_s: float = 600.0
    ) -> None:
        self.run_dir = folder / node
        self.run_dir.mkdir()
        self.node = node
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.run_dir / LISTENER_NAME))
        listener.listen(16)
        peers = socket.create_server(("127.0.0.1", 0))
        pair = None if key is None else new_key()
        url = f"tcp://127.0.0.1:{peers.getsockname()[1]}"
        self.host = SnapshotHost(url, SECRET + node.encode(), "" if pair is None else pair.public)
        self.control, theirs = socket.socketpair()
        ends = (theirs, listener, peers)
        self._start(*ends)
        order = ServeSnapshots(
            node=node,
            host=self.host,
            quota_bytes=quota_mb << 20,
            linger_s=linger_s,
            key=key,
            pair=pair,
        )
        self.control.sendall(encode_stream(order))

    def _start(self, *ends: socket.socket) -> None:
        command = [sys.executable, "-m", "unified.snapshot.server", *(str(end.fileno()) for end in ends)]
        self.process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())], pass_fds=[end.fileno() for end in ends]
        )
        for end in ends:
            end.close()

    def name_copy_node(self, copy_node: "SnapshotNode", job: str = "job-1") -> None:
        """Say which node holds copies of a job that is on this one alone."""
        self.control.sendall(encode_stream(NameCopyNodes({job: copy_node.host.address(copy_node.node, job)})))

    def persist(self) -> None:
        self.control.sendall(encode_stream(PersistSnapshots()))

    def heard(self) -> list[bool]:
        """What the agent was told since the last time: is there something to be persisted?"""
        self.control.settimeout(0.2)
        try:
            data = self.control.recv(65536)
        except TimeoutError:
            return []
        return [snapshots_to_agent.decode(body).is_to_persist for body in StreamBuffer().feed(data)]

    def memory_kib(self) -> int:
        """Memory of the process beside buffers that only workers touch."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0])

    def num_buffers(self) -> int:
        """Buffers that the server holds, of all ranks."""
        found = 0
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found += "unified-snapshot" in os.readlink(each)
        return found

    def end(self) -> int:
        """Hang up as an agent that ends; the exit code."""
        self.control.close()
        return self.process.wait(100)


class SnapshotThread(SnapshotNode):
    """A server that is a thread of this process, for a trace."""

    NAME = "test-snapshot-server"

    def _start(self, *ends: socket.socket) -> None:
        self._thread = threading.Thread(target=self._serve, args=ends, name=self.NAME, daemon=True)
        self._thread.start()

    def _serve(self, control: socket.socket, listener: socket.socket, peers: socket.socket) -> None:
        agent = AgentConnection(control)
        orders = agent.receive()
        assert isinstance(orders[0], ServeSnapshots)
        listener.setblocking(False)
        server = SnapshotServer(orders[0], listener, peers, agent.say)
        while not agent.is_over or server._connections:
            if server.step((listener if agent.is_over else control).fileno()):
                orders.extend(agent.receive())
        server.close()
        control.close()

    def end(self) -> int:
        self.control.close()
        self._thread.join(100)
        return int(self._thread.is_alive())


class SnapshotRank:
    """One rank, in this process, on one node."""

    def __init__(
        self,
        node: SnapshotNode,
        rank: int = 0,
        *,
        job: str = "job-1",
        token: str | None = None,
        storage: StorageTarget | None = None,
    ) -> None:
        self.series = SnapshotSeries(job, "trainer", 2, rank)
        self.token = token_of(SECRET + node.node.encode(), job) if token is None else token
        attach = AttachSeries(token=self.token, series=self.series, storage=storage)
        self.client = SnapshotClient(str(node.run_dir), attach)
        self.complaint = ""
        attached = self.client.attach()
        self.server: ServerAddress = attached.address
        self.copy_node = attached.copy_node

    @property
    def held(self) -> list[HeldSnapshot]:
        return self.client.attach().held

    def steps(self, *, is_copy: bool = False) -> list[tuple[int, int]]:
        """Ranks and steps that the node holds."""
        return sorted((each.rank, each.stamp.step) for each in self.held if each.is_copy == is_copy)

    def take(
        self,
        state: object,
        step: int,
        *,
        partner: ServerAddress | None = None,
        needed: tuple[SnapshotStamp, ...] = (),
        to_copy_node: bool = False,
        to_storage: bool = False,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        image = StateImage(state)
        target = self.client.begin(image.length, needed, is_sent=partner is not None or to_copy_node or to_storage)
        self.complaint = target.complaint
        image.write(target.buffer.memory)
        before_commit()
        stamp = SnapshotStamp(1, step)
        self.client.commit(
            CommitSnapshot(
                buffer=target.number,
                stamp=stamp,
                length=image.length,
                partner=partner,
                to_copy_node=to_copy_node,
                to_storage=to_storage,
            )
        )

    def read(
        self, step: int, *, of: SnapshotSeries | None = None, server: ServerAddress | None = None, length: int = 100
    ) -> object:
        """The state of a step, of this rank or another, on this node or another, which says how long it is."""
        found = SnapshotSource(series=of or self.series, length=length, server=server or self.server)
        return read_state(self.client.open(found, SnapshotStamp(1, step), self.server))


def a_state(value: float, numel: int = 1000) -> dict[str, object]:
    return {"weights": torch.full((numel,), value), "step": int(value)}
