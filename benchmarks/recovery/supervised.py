"""A master and agents that come back when they are killed, as a service manager would bring them."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from benchmarks.launch.run import free_port
from unified.client.connection import MasterConnection
from unified.client.daemons import Daemon, kill_marked
from unified.protocol.client_master import ListNodes, NodeList
from unified.protocol.records import NodeState

RESTART_S = 1.0
"""Time from the death of a daemon to its next start: `RestartSec=` of the units in `deploy/systemd`."""
POLL_S = 0.02
READY_S = 60.0
MARK = "UNIFIED_BENCH_CLUSTER"


class SupervisedCluster:
    """A master and `nodes` agents on this host, each started again `RESTART_S` after its end."""

    def __init__(self, home: Path, nodes: int, devices: int, env: Mapping[str, str] | None = None) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.names = [f"node-{number + 1}" for number in range(nodes)]
        self._home = home
        self._devices = devices
        self._mark = f"{MARK}={home}"
        self._run_dir = tempfile.TemporaryDirectory(prefix="u-", dir="/tmp")
        self._env = {
            **os.environ,
            **(env or {}),
            "UNIFIED_HOME": str(home),
            "UNIFIED_RUN_DIR": self._run_dir.name,
            MARK: str(home),
        }
        self._daemons: dict[str, Daemon] = {}
        self._ended_at: dict[str, float] = {}
        self._is_stopping = threading.Event()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._supervise)

    def __enter__(self) -> Self:
        self._thread.start()  # children die with the thread that started them
        self._is_up.wait()
        deadline = time.monotonic() + READY_S
        with MasterConnection(self.address, timeout_s=READY_S) as connection:
            while len(self._alive(connection)) < len(self.names):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"only {self._alive(connection)} registered within {READY_S:g} s")
                time.sleep(POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._thread.join()
        kill_marked(self._mark, 2.0)
        self._run_dir.cleanup()

    def pid(self, name: str) -> int | None:
        """Pid of ``master`` or of a node's agent; None while it is away."""
        daemon = self._daemons.get(name)
        return None if daemon is None or daemon.is_ended else daemon.pid

    def workers(self) -> dict[int, str]:
        """Pids of all workers now, with their names."""
        found: dict[int, str] = {}
        for name in self.names:
            if (pid := self.pid(name)) is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        command = " ".join(process.cmdline())
                        if command.startswith("unified worker: "):
                            found[process.pid] = command.split()[2]
        return found

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _supervise(self) -> None:
        self._start("master")
        for name in self.names:
            self._start(name)
        self._is_up.set()
        while not self._is_stopping.wait(POLL_S):
            for name, daemon in list(self._daemons.items()):
                if daemon.is_ended and time.monotonic() - self._ended_at.setdefault(name, time.monotonic()) > RESTART_S:
                    del self._ended_at[name]
                    self._start(name)
        Daemon.end_all([self._daemons[name] for name in self.names], 15.0)
        Daemon.end_all([self._daemons["master"]], 3.0)

    def _start(self, name: str) -> None:
        state = ["--state-dir", str(self._home / name)]
        if name == "master":
            module, arguments = "unified_master", ["--bind", self.address, *state]
        else:
            arguments = ["--master", self.address, "--node-id", name, "--devices", str(self._devices), *state]
            module = "unified_agent"
        self._daemons[name] = Daemon(module, arguments, self._home / f"{name}.log", self._env)

    @staticmethod
    def _alive(connection: MasterConnection) -> list[str]:
        return [n.node for n in connection.ask(ListNodes(), NodeList).nodes if n.state == NodeState.ALIVE]
