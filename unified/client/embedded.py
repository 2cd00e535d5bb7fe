"""A cluster of its own for one driver: a master and agents as child processes on this host.

One thread starts, watches and ends the child processes. It runs as long as the cluster, because the kernel sends the
parent-death signal when the *thread* that started a child ends. The cluster of a killed driver dies, too. A driver that
ends in order stops the agents before the master, and leaves nothing behind.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from unified.bus.shm.files import Sweeper
from unified.client.daemons import Daemon, kill_marked, marked_processes
from unified.client.preload import Preload
from unified.config import clusters, settings
from unified.config.clusters import ClusterRecord
from unified.core.backoff import Backoff
from unified.errors import ClusterError, MasterUnreachableError
from unified.protocol.client_master import ListNodes, NodeList
from unified.protocol.records import NodeState
from unified.security.keys import KEY_VARIABLE, find_key, write_key
from unified.threads import start_thread

CLUSTER_VARIABLE = "UNIFIED_CLUSTER_ID"
"""In the environment of every process of an embedded cluster, workers included."""
MAX_KEPT = 10
NOTE_S = 10.0
"""Time after which a start is logged as slow, and then whenever it has doubled."""
POLL_S = 0.01
MASTER_STOP_S = 3.0
MASTER_BACKOFF = Backoff()
"""Pause between two starts of a master, because its cause of death, such as a full disk, may still be there."""
LEFTOVER_S = 1.0


class StartLimit:
    """Time limit of a start, in seconds (None: as long as its processes live). A start that takes long is logged."""

    def __init__(self, logs: Path, timeout_s: float | None = None) -> None:
        self._logs, self._timeout_s, self._began, self._note_s = logs, timeout_s, time.monotonic(), NOTE_S

    def check(self, waits_for: str) -> None:
        """Raise `ClusterError` if the time is over."""
        waited_s = time.monotonic() - self._began
        text = f"the cluster is not ready after {waited_s:.3g} s: {waits_for}; logs: {self._logs}"
        if self._timeout_s is not None and waited_s > self._timeout_s:
            raise ClusterError(text)
        if waited_s >= self._note_s:
            self._note_s *= 2
            logging.getLogger("unified.cluster").warning("%s. The start goes on while its processes live.", text)


class EmbeddedCluster:
    """A master and agents on this host, until this process ends.

    Args:
        nodes: number of agents; they are called node-1, node-2, …
        devices_per_node: virtual devices of each; None means the accelerators that the host really has.
        cpus_per_node: CPUs that each offers; None means those that this process may use.
        home: where logs and state go; None means a new folder below ``<unified home>/embedded``, of which the newest
            ten are kept.
        env: further environment variables of the daemons, which the workers inherit.
        max_agent_restarts: how often each agent that died is started again.
        max_master_restarts: how often the master is started again, at its address and with its state.
        idle_s: a number makes it a cluster that stays: any process of this user finds it, and it has its own key. The
            number is only recorded: it ends nothing here.

    Attributes:
        address: ``tcp://127.0.0.1:PORT`` of the master.
        cluster_id: the value of ``UNIFIED_CLUSTER_ID`` in all its processes.
        problem: why the cluster is of no use any more, or None.
        preload, modules: what the zygotes import before they fork, and further modules; they count at `begin`.
        environ: what the daemons and workers inherit.
        left_behind: after `stop`: processes that had to be killed and sockets that nobody removed.
    """

    def __init__(
        self,
        nodes: int = 1,
        devices_per_node: int | None = 1,
        *,
        cpus_per_node: float | None = None,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        max_agent_restarts: int = 5,
        max_master_restarts: int = 0,
        idle_s: float | None = None,
    ) -> None:
        self.cluster_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(3).hex()}"
        self.home = settings.home() / "embedded" / self.cluster_id if home is None else home
        self.set_nodes(nodes)
        self.devices_per_node = devices_per_node
        self.cpus_per_node = cpus_per_node
        self.preload: Preload = ""
        self.modules: list[str] = []
        self.environ = dict(os.environ)
        self.problem: str | None = None
        self.left_behind: list[str] = []
        self._is_own_home = home is None
        self._owner = os.getpid()
        self._env = {**(env or {}), **settings.python_path({**self.environ, **(env or {})})}
        self._max_agent_restarts = max_agent_restarts
        self.max_master_restarts = max_master_restarts
        self._idle_s = idle_s
        self.address = ""
        self._address_file = self.home / "master.address"
        self._run_dir = settings.run_root() / f"e{os.getpid()}-{self.cluster_id[-6:]}"
        self._master: Daemon | None = None
        self._agents: list[Daemon] = []
        self._stopping = threading.Event()
        self._is_sized = threading.Event()
        self._spawned = threading.Event()
        self._ended = threading.Event()
        self._stop_timeout_s = 0.0
        self._wake = -1
        self._lock_file: int | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def set_nodes(self, nodes: int) -> None:
        """Set the number of agents, before `start`."""
        self.node_names = [f"node-{index + 1}" for index in range(nodes)]

    @property
    def master_pid(self) -> int:
        return self._master.pid if self._master is not None else 0

    @property
    def agent_pids(self) -> list[int]:
        """Pids by node; that of an agent changes when it is started again."""
        return [agent.pid for agent in self._agents]

    def begin(self) -> Self:
        """Start the master and the first node's zygote, before the attributes above are final. Raises as `start`."""
        settings.check_descriptors()
        try:
            self._prepare()
        except OSError as error:
            raise ClusterError(f"the embedded cluster cannot be prepared: {error}") from None
        self._thread = start_thread("unified-embedded", self._supervise)
        atexit.register(self.stop)
        return self

    def start(self, timeout_s: float | None = None) -> Self:
        """Start everything and wait until every agent is registered, without a time limit as long as all daemons live.

        Raises:
            UsageError: this process may open too few files.
            ClusterError: a daemon ended, and the message has its last words; or it was not ready after `timeout_s`.
        """
        if self._thread is None:
            self.begin()
        self._is_sized.set()
        try:
            self._wait_until_ready(StartLimit(self.home, timeout_s))
            clusters.write_record(self._run_dir, self._record())
        except BaseException:
            self.stop(timeout_s=1.0)
            raise
        return self

    def stop(self, timeout_s: float = 15.0) -> None:
        """End the agents, then the master, and wait for it. Safe to call twice.

        If an exception such as Ctrl-C interrupts it, everything is killed; then the exception is raised.

        Args:
            timeout_s: how long the agents may take to stop their workers; then everything is killed.
        """
        if self._thread is None or os.getpid() != self._owner:  # a forked child of the driver ends, not the driver
            return
        self._stop_timeout_s = timeout_s
        interruption: BaseException | None = None
        while not self._ended.is_set():  # in Python 3.11 an interrupted join takes its thread for ended
            try:
                self._stopping.set()
                os.eventfd_write(self._wake, 1)
                self._ended.wait()
            except BaseException as error:
                interruption = error
                self._stop_timeout_s = 0.0
                for daemon in [*self._agents, *([self._master] if self._master is not None else [])]:
                    daemon.signal(signal.SIGKILL)
        self._thread.join()
        self._thread = None
        os.close(self._wake)
        atexit.unregister(self.stop)
        if interruption is not None:
            raise interruption

    def _prepare(self) -> None:
        if self._is_own_home:
            _prune(self.home.parent, MAX_KEPT - 1)
        settings.make_folder(self.home)
        settings.make_run_root()
        clusters.sweep(self._run_dir.parent)
        settings.make_private(self._run_dir)
        self._lock_file = clusters.lock(self._run_dir / clusters.LOCK_NAME)
        if self._key_file is not None:
            from unified.security.curve import new_key  # imports ZeroMQ, for which the daemons need not wait

            write_key(self._key_file, new_key())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    @property
    def _key_file(self) -> Path | None:
        return None if self._idle_s is None else self._run_dir / clusters.KEY_NAME

    def _record(self) -> ClusterRecord:
        return ClusterRecord(
            address=self.address,
            home=str(self.home),
            pid=self._owner,
            space=clusters.space(),
            nodes=len(self.node_names),
            devices=self.devices_per_node,
            idle_s=self._idle_s,
            key_file=str(self._key_file or ""),
        )

    def _wait_until_ready(self, limit: StartLimit) -> None:
        from unified.client.connection import MasterConnection  # imported while the daemons start

        while not self._spawned.wait(POLL_S):
            self.check()
            limit.check("the master did not write its address")
        key = find_key(self.address, self._environment())
        with MasterConnection(self.address, key=key) as connection:
            while True:
                try:
                    nodes = connection.ask(ListNodes(), NodeList, timeout_s=1.0).nodes
                except MasterUnreachableError:  # if it has died, `check` raises
                    nodes = []
                alive = {node.node for node in nodes if node.state == NodeState.ALIVE}
                if alive.issuperset(self.node_names):
                    return
                missing = ", ".join(name for name in self.node_names if name not in alive)
                self.check()
                limit.check(f"the master does not know {missing}")
                self._stopping.wait(POLL_S)

    def check(self) -> None:
        """Raise `ClusterError` if the cluster is of no use any more."""
        if self.problem is not None:
            raise ClusterError(self.problem)

    def _supervise(self) -> None:
        """The thread that owns the daemons."""
        try:
            self._start_first()
            if self._spawned.is_set():
                self._watch()
        except OSError as error:
            self.problem = f"the embedded cluster cannot be started: {str(error).rstrip('.')}."
        finally:
            self._stopping.wait()  # children die with this thread, so it outlives them
            try:
                self._tear_down()
            finally:
                self._ended.set()

    def _start_first(self) -> None:
        self._address_file.unlink(missing_ok=True)
        self._agents.append(self._start_early(self.node_names[0]))  # first: all else will wait for its zygote
        self._master = self._start_master("tcp://127.0.0.1:0")
        while not self._stopping.wait(POLL_S) and not self._spawned.is_set():
            if self._is_sized.is_set():
                self._agents += map(self._start_early, self.node_names[len(self._agents) :])
                if self._address_file.exists() and (text := self._address_file.read_text()).endswith("\n"):
                    self.address = text.strip()
                    for agent, name in zip(self._agents, self.node_names, strict=True):
                        agent.tell(msgspec.json.encode(self._agent_flags(name)) + b"\n")
                    self._spawned.set()
            if self._master.is_ended and self.problem is None:
                self.problem = f"the embedded master {self._master.last_words()}"

    def _start_master(self, bind: str) -> Daemon:
        arguments = ["--bind", bind, "--state-dir", str(self.home / "master")]
        arguments += ["--address-file", str(self._address_file), "--die-with-parent", str(self._owner)]
        return Daemon("unified_master", arguments, self.home / "master.log", self._environment())

    def _start_early(self, name: str) -> Daemon:
        arguments = ["--early", str(self._owner), name, *self._preload_flag()]
        return Daemon("unified_agent", arguments, self.home / f"{name}.log", self._environment(), has_input=True)

    def _start_agent(self, name: str) -> Daemon:
        return Daemon("unified_agent", self._agent_flags(name), self.home / f"{name}.log", self._environment())

    def _agent_flags(self, name: str) -> list[str]:
        arguments = ["--master", self.address, "--node-id", name, *self._preload_flag()]
        arguments += ["--state-dir", str(self.home / name), "--die-with-parent", str(self._owner)]
        if self.devices_per_node is not None:
            arguments += ["--devices", str(self.devices_per_node)]
        if self.cpus_per_node is not None:
            arguments += ["--cpus", str(self.cpus_per_node)]
        return arguments

    def _preload_flag(self) -> list[str]:
        return ["--preload", ",".join(self.modules)] if self.modules else []

    def _environment(self) -> dict[str, str]:
        own = {
            **({} if self._key_file is None else {KEY_VARIABLE: str(self._key_file)}),
            CLUSTER_VARIABLE: self.cluster_id,
            "UNIFIED_HOME": str(self.home),
            "UNIFIED_RUN_DIR": str(self._run_dir),
            settings.PRELOAD: self.preload,
        }
        return {**self.environ, **self._env, **own}

    def _watch(self) -> None:
        """Start again the daemons that died, within limits, until `stop`."""
        restarts = [0] * len(self._agents)
        num_master_restarts = 0
        while not self._stopping.is_set():
            Daemon.wait_any([self._master, *self._agents] if self._master else self._agents, self._wake)
            if self._stopping.is_set():
                return
            if self._master is not None and self._master.is_ended and self.problem is None:
                if num_master_restarts >= self.max_master_restarts:
                    self.problem = f"the embedded master {_times(num_master_restarts)}{self._master.last_words()}"
                elif not self._stopping.wait(MASTER_BACKOFF.delay_s(num_master_restarts)):
                    num_master_restarts += 1
                    self._master = self._start_master(self.address)
            for index, agent in enumerate(self._agents):
                if agent.is_ended and self.problem is None:
                    if restarts[index] >= self._max_agent_restarts:
                        self.problem = (
                            f"the embedded agent {self.node_names[index]} ended {restarts[index] + 1} times; the last "
                            f"time it {agent.last_words()}"
                        )
                    else:
                        restarts[index] += 1
                        self._agents[index] = self._start_agent(self.node_names[index])
            if self.problem is not None:
                return

    def _tear_down(self) -> None:
        (self._run_dir / clusters.RECORD_NAME).unlink(missing_ok=True)  # nobody may find a cluster that ends
        Daemon.end_all(self._agents, self._stop_timeout_s)
        if self._master is not None:
            Daemon.end_all([self._master], min(MASTER_STOP_S, max(self._stop_timeout_s, 0.5)))
        self.left_behind = [
            f"process {process}" for process in kill_marked(f"{CLUSTER_VARIABLE}={self.cluster_id}", LEFTOVER_S)
        ]
        self.left_behind += [f"socket {path}" for path in _sockets(self._run_dir)]
        Sweeper().sweep(time.monotonic(), time.time(), is_last=True)  # a killed agent leaves its workers' shared memory
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._lock_file is not None:
            os.close(self._lock_file)


def _times(num_restarts: int) -> str:
    limit = f"(master_max_restart={num_restarts})"
    return f"ended {num_restarts + 1} times {limit}; the last time it " if num_restarts else ""


def _sockets(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if stat.S_ISSOCK(path.lstat().st_mode)]


def _prune(folder: Path, keep: int) -> None:
    """Remove the oldest folders of clusters that have ended."""
    if not folder.is_dir():
        return
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for home in folders[: max(0, len(folders) - keep)]:
        if not marked_processes(f"{CLUSTER_VARIABLE}={home.name}"):
            shutil.rmtree(home, ignore_errors=True)
