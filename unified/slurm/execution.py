"""A cluster on an allocation of SLURM: a master here, an agent on each node in one step of srun, and a driver.

The agents' key goes through srun's stdin, which SLURM copies to every task. The end of that file asks agents to leave,
because SLURM's own signals would end the step. Nobody has to choose a port. When SLURM says that the time is over, all
jobs are suspended: workers save within their grace period. The jobs go on when the allocation starts again, because
the master's state is in the folder of the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from unified import process
from unified.client.connection import MasterConnection
from unified.client.daemons import Daemon, last_lines
from unified.client.suspension import suspend, suspended
from unified.config.addresses import MASTER_VARIABLE
from unified.config.ports import address_of, address_towards
from unified.core.backoff import Backoff
from unified.errors import ClusterError, UnifiedError, UsageError
from unified.job.driver import STORY_FOLDER
from unified.job.spec import ENDS_AT
from unified.protocol.client_master import ListNodes, NodeList
from unified.protocol.records import NodeState
from unified.security.curve import new_key
from unified.security.keys import KEY_VARIABLE, load_key, write_key
from unified.slurm import commands
from unified.slurm.allocation import NodeOptions, SlurmAllocation
from unified.slurm.ending import END_S, SUSPEND, Ending

READY_S = 180.0
"""Seconds that the agents may take to start: a shared file system is slow when all nodes read one environment."""
POLL_S = 0.05
STOP_S = 60.0
MASTER_BACKOFF = Backoff()
MAX_MASTER_RESTARTS = 10


class Execution:
    """Runs one allocation, in the main thread.

    Args:
        nodes: least number of nodes.
        spare_from: nodes beyond this number are in reserve.
        agents: options of the agents.
        requeues: greatest number of restarts; then the allocation does not go back into the queue. None: no limit.
        command: command of the driver; empty: no driver, and the cluster stays until Ctrl-C.
        unified: the words that run the command line of this installation.
    """

    def __init__(
        self,
        allocation: SlurmAllocation,
        folder: Path,
        *,
        nodes: int,
        spare_from: int,
        agents: NodeOptions,
        requeues: int | None,
        command: Sequence[str],
        unified: Sequence[str],
    ) -> None:
        self._allocation = allocation
        self._folder = folder
        self._nodes = nodes
        self._spare_from = spare_from
        self._options = agents
        self._command = command
        self._unified = unified
        self._key_file = folder / commands.KEY_NAME
        self._address_file = folder / commands.ADDRESS_NAME
        self._address = ""
        self._master: Daemon | None = None
        self._num_master_restarts = 0
        self._agents: list[subprocess.Popen[bytes]] = []
        """Steps of srun, one for each component of a heterogeneous job."""
        self._doctors: list[subprocess.Popen[bytes]] = []
        self._driver: subprocess.Popen[bytes] | None = None
        self._ending = Ending(allocation.slurm_id, allocation.num_restarts, requeues)
        self._reason = ""
        """Reason of the first suspend."""

    def run(self) -> int:
        """Run the cluster to its end; return the driver's exit code, or 75 if its job waits for the next allocation."""
        number = self._allocation.num_nodes
        if number < self._nodes:
            raise UsageError(
                f"allocation {self._allocation.slurm_id} has {_nodes(number)}, and the job needs {self._nodes}: "
                f"ask for more with -N {self._nodes}."
            )
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            with self._own_folder():
                try:
                    self._start()
                    code = self._drive() if self._command else self._stay()
                finally:
                    self._stop()
            if not self._ending.is_unfinished:
                return code
            goes_back, text = self._ending.requeues()
            if text:
                _say(text)
            if goes_back:
                commands.requeue(self._allocation.slurm_id)
            return os.EX_TEMPFAIL
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._ending.note(number, time.monotonic())

    # Start

    @contextlib.contextmanager
    def _own_folder(self) -> Iterator[None]:
        """Lock the folder of the allocation, for this user alone."""
        try:
            self._folder.parent.mkdir(exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ClusterError(f"the folder {self._folder} cannot be used: {error.strerror}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UsageError(
                f"allocation {self._allocation.slurm_id} has a cluster already: `unified --slurm "
                f"{self._allocation.slurm_id} nodes` shows it."
            ) from None
        finally:
            os.close(lock)

    def _start(self) -> None:
        if not self._allocation.num_restarts:  # the folder may be of an older job: SLURM reuses ids
            shutil.rmtree(self._folder / "master", ignore_errors=True)
            self._key_file.unlink(missing_ok=True)
        if not self._key_file.exists():
            write_key(self._key_file, new_key())
        address = self._own_address()
        self._start_master(f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0")
        self._start_agents()
        # Each node reports what is wrong with it, while the agents start.
        with (self._folder / "srun.log").open("ab") as log:
            for step in self._allocation.steps():
                words = [*self._in_step(step), "doctor", "--host", "--quiet"]
                doctor = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2, stderr=log, start_new_session=True)
                self._doctors.append(doctor)
        self._await_nodes()

    def _in_step(self, step: Sequence[str]) -> list[str]:
        return self._options.in_step(step, self._unified, self._folder.parent.parent, os.environ)

    def _own_address(self) -> str:
        """Return this host's address on the chosen interface, else the one towards another node, or the only node."""
        if self._options.interface:
            return address_of(self._options.interface)
        names = commands.hostnames(self._allocation.nodes)
        other = next((name for name in names if name != self._allocation.node), names[0])
        target = commands.node_address(other)
        try:
            return address_towards(target, 1)
        except OSError as error:
            raise ClusterError(f"no address of this host leads to node {other} ({target}): {error.strerror}.") from None

    def _start_master(self, bind: str) -> None:
        self._address_file.unlink(missing_ok=True)
        arguments = ["--bind", bind, "--state-dir", str(self._folder / "master")]
        arguments += ["--address-file", str(self._address_file), "--die-with-parent", str(os.getpid())]
        self._master = Daemon("unified_master", arguments, self._folder / "master.log", self._environment())
        deadline = time.monotonic() + READY_S
        while not (self._address_file.exists() and (text := self._address_file.read_text()).endswith("\n")):
            if self._master.is_ended:
                raise ClusterError(f"the master {self._master.last_words()}")
            self._check_start(deadline, f"the master has not written {self._address_file}")
            time.sleep(POLL_S)
        self._address = text.strip()

    def _start_agents(self) -> None:
        own = ["slurm", "agent", "--master", self._address, "--folder", str(self._folder), "--until-eof"]
        own += NodeOptions(devices=self._options.devices, interface=self._options.interface).words()
        ends_at = commands.ends_at(self._allocation.slurm_id)
        environment = {**os.environ, ENDS_AT: str(ends_at or "")}
        steps = self._allocation.steps()
        for group, step in enumerate(steps):
            component = [f"--group={group}"] if len(steps) > 1 else []
            component += [f"--spare-from={self._spare_from}"] if group == 0 else []
            with (self._folder / "srun.log").open("ab") as log:
                agents = subprocess.Popen(
                    [*self._in_step(step), *own, *component],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at a terminal is for the driver
                )
            self._agents.append(agents)
            assert agents.stdin is not None
            agents.stdin.write(self._key_file.read_bytes())
            agents.stdin.flush()

    def _await_nodes(self) -> None:
        """Wait for all nodes; after half of `READY_S` only for the least number."""
        deadline, number, total = time.monotonic() + READY_S, 0, self._allocation.num_nodes
        with self._connect() as connection:
            while number < total and not (number >= self._nodes and time.monotonic() > deadline - READY_S / 2):
                self._check_start(deadline, f"{number} of {_nodes(total)} came, and the job needs {self._nodes}")
                self._revive_master()
                self._check_agents()
                with contextlib.suppress(UnifiedError):
                    number = self._num_alive(connection)
                time.sleep(2 * POLL_S)
        _say(f"{number} of {_nodes(total)} joined {self._address}; logs: {self._folder}")

    def _num_alive(self, connection: MasterConnection) -> int:
        """Return the number of nodes of the allocation whose agent is alive."""
        nodes = connection.ask(ListNodes(), NodeList, timeout_s=1.0).nodes
        own = [node for node in nodes if node.labels.get("slurm_job") == self._allocation.slurm_id]
        return sum(node.state == NodeState.ALIVE for node in own)

    def _check_start(self, deadline: float, waits_for: str) -> None:
        if self._driver is None and self._ending.is_time_over:
            raise ClusterError(
                "the time limit of the allocation is too short: SLURM announced its end before the cluster was up."
            )
        if self._driver is None and self._ending.is_asked:
            raise ClusterError("the allocation ends before the cluster is up.")
        if time.monotonic() > deadline:
            words = last_lines(self._folder / "srun.log")
            raise ClusterError(f"the cluster was not up after {READY_S:g} s: {waits_for}; logs: {self._folder}.{words}")

    def _connect(self) -> MasterConnection:
        return MasterConnection(self._address, key=load_key(self._key_file), timeout_s=3.0)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, KEY_VARIABLE: str(self._key_file)}

    # Driver

    def _drive(self) -> int:
        environment = {**self._environment(), MASTER_VARIABLE: self._address, STORY_FOLDER: str(self._folder)}
        try:
            self._driver = driver = subprocess.Popen(
                self._command, env=environment, preexec_fn=lambda: process.die_with_parent(signal.SIGTERM)
            )
        except OSError as error:
            raise UsageError(f"{self._command[0]} cannot be started: {error.strerror}.") from None
        while (code := driver.poll()) is None:
            self._watch()
            if (due := self._ending.due(time.monotonic())) == SUSPEND:
                self._suspend()
            elif isinstance(due, signal.Signals):
                driver.send_signal(due)
        self._ending.driver_ended(code, has_suspended=self._ending.has_begun and self._has_suspended())
        return 128 - code if code < 0 else code

    def _stay(self) -> int:
        """Keep the cluster until a signal ends it."""
        _say(
            f"use it with:  export {MASTER_VARIABLE}={self._address} {KEY_VARIABLE}={self._key_file}\n"
            f"or:  unified --slurm {self._allocation.slurm_id} nodes     (Ctrl-C ends the cluster)"
        )
        while not self._ending.is_asked:
            self._watch()
        if self._ending.has_begun:
            end_at = self._suspend()
            with contextlib.suppress(UnifiedError, TimeoutError), self._connect() as connection:
                suspend(connection, "", "the allocation ends", end_at - time.monotonic())
        return 0

    def _watch(self) -> None:
        self._revive_master()
        self._check_agents()
        time.sleep(POLL_S)

    def _revive_master(self, within_s: float = 0.0) -> None:
        """Start the master again, at its address and with its state, if it has ended or ends within `within_s`."""
        assert self._master is not None
        if not self._master.wait(within_s):
            return
        if self._num_master_restarts >= MAX_MASTER_RESTARTS:
            raise ClusterError(f"the master ended again and again; the last time it {self._master.last_words()}")
        time.sleep(MASTER_BACKOFF.delay_s(self._num_master_restarts))
        self._num_master_restarts += 1
        self._start_master(self._address)

    def _check_agents(self) -> None:
        """Check for ended steps. A preemption sends SIGTERM to the steps first; then their agents leave in order."""
        codes = [agents.poll() for agents in self._agents]
        if self._ending.has_begun or codes.count(None) == len(codes):
            return
        if any(codes):
            words = last_lines(self._folder / "srun.log")
            raise ClusterError(f"all agents of a step have ended (srun: exit code {max(filter(None, codes))}):{words}")
        _say("SLURM has ended the agents, as for a preemption")
        self._note(signal.SIGUSR1, None)

    def _suspend(self) -> float:
        """Suspend all jobs; return the time by which they must have saved."""
        if self._ending.is_terminated:
            self._revive_master(within_s=1.0)  # SLURM sends SIGTERM to all processes of a job, also to the master
        left_s = self._left_s() if self._ending.is_time_over else None
        reason, until = self._ending.suspends(time.monotonic(), left_s)
        is_first, self._reason = not self._reason, self._reason or reason
        if is_first:
            _say(reason)
        try:
            with self._connect() as connection:
                suspend(connection, "", self._reason, None)
        except UnifiedError as error:
            if is_first:
                _say(str(error))
        return until

    def _has_suspended(self) -> bool:
        """Return True if a job waits for the next allocation, or nobody can tell."""
        try:
            with self._connect() as connection:
                return bool(suspended(connection))
        except UnifiedError:
            return True

    def _left_s(self) -> float | None:
        ends_at = commands.ends_at(self._allocation.slurm_id)
        return None if ends_at is None else max(0.0, ends_at - time.time())

    # End

    def _stop(self) -> None:
        """End driver, agents and master, in this order, even if one step fails."""
        for child in (*([self._driver] if self._driver is not None else []), *self._doctors):
            if child.poll() is None:
                child.terminate()
                _wait(child, END_S)
        for agents in self._agents:
            with contextlib.suppress(OSError):
                assert agents.stdin is not None
                agents.stdin.close()
        self._await_agents(END_S if self._ending.is_terminated else STOP_S)
        for agents in self._agents:
            agents.terminate()
            _wait(agents, END_S)
        if self._master is not None:
            Daemon.end_all([self._master], END_S)
        with contextlib.suppress(OSError):
            self._address_file.unlink(missing_ok=True)
            if not self._ending.is_unfinished:
                self._key_file.unlink(missing_ok=True)

    def _await_agents(self, within_s: float) -> None:
        """Wait for the end of the agents' steps. A step with a lost host does not end by itself: it has `END_S` after
        the last agent has left."""
        deadline, are_gone = time.monotonic() + within_s, False
        while time.monotonic() < deadline and any(agents.poll() is None for agents in self._agents):
            time.sleep(2 * POLL_S)
            if not are_gone and self._are_agents_gone():
                are_gone, deadline = True, min(deadline, time.monotonic() + END_S)

    def _are_agents_gone(self) -> bool:
        """Return True if the master says that no agent is left."""
        if self._master is None or self._master.is_ended:
            return False
        try:
            with self._connect() as connection:
                return self._num_alive(connection) == 0
        except UnifiedError:
            return False


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _say(text: str) -> None:
    print("\n".join(f"unified slurm: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number != 1 else ''}"
