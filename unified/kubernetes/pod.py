"""Processes of one pod of a run: an agent and, in the first pod, the master and the driver. The pod's PID 1.

A daemon that is killed is started again, as Kubernetes would do for a container. A daemon that ends by itself is not: a
restart would not remove its reason. The driver's end is the end of the run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from unified.errors import ClusterError, UsageError
from unified.kubernetes.render import CONTROL_PORT, RELAY_PORT
from unified.process import describe_end
from unified.values import Value

READY_WITHIN_S = 120.0
"""Seconds until the master must take requests and its name must be known."""
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
_STOP_MARGIN_S = 20.0
"""Seconds that daemons have beyond the grace period of the workers: less than the pod has."""
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_POLL_S = 0.1


class PodPlace(Value, frozen=True):
    """The pod's place in the run, from the downward API."""

    node_id: str
    address: str
    master_host: str
    """Name of the first pod, which has the master and the driver: its node id, a dot, the name of the Service."""
    health_bind: str
    grace_s: float


class RunPod:
    """Supervisor of one pod.

    Args:
        command: command of the driver, for the first pod.
    """

    def __init__(self, place: PodPlace, command: Sequence[str], address_file: Path) -> None:
        self.commands = commands(place, command, address_file)
        """Command lines by name, in the order of their start."""
        self._place = place
        self._address_file = address_file
        self._env = {**os.environ, "UNIFIED_MASTER": f"tcp://{place.master_host}:{CONTROL_PORT}"}
        self._pids: dict[int, str] = {}
        self._restarts: list[float] = []

    def run(self) -> int:
        """Run until the driver has ended, or a signal comes; return the exit code, 143 for SIGTERM.

        A stopped pod does not return 0, because its index would then count as done.
        """
        self._address_file.unlink(missing_ok=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return self._follow()
        finally:
            self._stop()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _follow(self) -> int:
        waits_for_master = "driver" in self.commands
        for name in self.commands:
            if name != "driver":
                self._start(name)
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            if waits_for_master and self._is_master_ready():
                self._start("driver")
                waits_for_master = False
            elif waits_for_master and time.monotonic() > deadline:
                raise ClusterError(
                    f"no master at {self._place.master_host} after {READY_WITHIN_S:g} s: its log is above; the name is "
                    "that of a headless Service with publishNotReadyAddresses."
                )
            found = signal.sigtimedwait(_SIGNALS, _POLL_S if waits_for_master else 60.0)
            if found is not None and found.si_signo != signal.SIGCHLD:
                return 128 + found.si_signo
            for name, code in self._reap():
                if name == "driver":
                    return code if code >= 0 else 128 - code
                if code >= 0 or not self._may_start_again():
                    _say(f"the {name} ended ({describe_end(code)}), and so does the pod")
                    return code if code > 0 else 1
                _say(f"the {name} ended ({describe_end(code)}); it is started again")
                self._start(name)

    def _is_master_ready(self) -> bool:
        try:
            return self._address_file.exists() and bool(socket.getaddrinfo(self._place.master_host, CONTROL_PORT))
        except OSError:  # not in the DNS yet
            return False

    def _may_start_again(self) -> bool:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_S] + [now]
        return len(self._restarts) <= MAX_RESTARTS

    def _start(self, name: str) -> None:
        words = self.commands[name]
        try:
            pid = os.posix_spawnp(words[0], words, self._env, setsigmask=[])
        except OSError as error:
            raise UsageError(f"{words[0]} cannot be started: {error.strerror}. The image has to have it.") from None
        self._pids[pid] = name

    def _reap(self) -> Iterator[tuple[str, int]]:
        """Yield this object's processes that have ended. Other orphans of the pod, which come to PID 1, are reaped."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._pids:
                yield self._pids.pop(pid), os.waitstatus_to_exitcode(status)

    def _stop(self) -> None:
        """End the driver, then the agent, then the master: each is needed until the one before it has ended."""
        deadline = time.monotonic() + self._place.grace_s + _STOP_MARGIN_S
        for name in reversed(self.commands):
            for pid in [pid for pid, each in self._pids.items() if each == name]:
                os.kill(pid, signal.SIGTERM)
                while pid in self._pids and (left_s := deadline - time.monotonic()) > 0:
                    signal.sigtimedwait({signal.SIGCHLD}, min(left_s, 1.0))
                    list(self._reap())
                if pid in self._pids:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    del self._pids[pid]


def commands(place: PodPlace, driver: Sequence[str], address_file: Path) -> dict[str, list[str]]:
    """Return the command lines of a pod's processes, by name, in the order of their start."""
    python = [sys.executable, "-P", "-m"]  # -P: do not import a user's own modules from the working directory
    agent = [
        *python,
        "unified_agent",
        f"--master=tcp://{place.master_host}:{CONTROL_PORT}",
        f"--node-id={place.node_id}",
        f"--address={place.address}",
        f"--health-bind={place.health_bind}",
    ]
    if place.master_host.partition(".")[0] != place.node_id:
        return {"agent": agent}
    master = [
        *python,
        "unified_master",
        f"--bind=tcp://0.0.0.0:{CONTROL_PORT}",
        f"--relay-bind=tcp://0.0.0.0:{RELAY_PORT}",
        f"--advertise={place.master_host}",
        f"--address-file={address_file}",
    ]
    return {"master": master, "agent": agent, "driver": list(driver)}


def _say(text: str) -> None:
    print(f"unified kubernetes pod: {text}", file=sys.stderr, flush=True)
