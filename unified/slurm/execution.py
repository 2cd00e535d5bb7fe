"""A cluster on an allocation of SLURM: a master here, an agent on each node in one step of srun, and a driver.

The agents' key goes through srun's stdin, which SLURM copies to every task, and its end of file asks them to leave:
SLURM's own signals end a step. No port is chosen by anybody. When SLURM says that the time is over, all jobs are
suspended: workers save within their grace. Those that have not ended go on when the allocation starts again, since
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

READY_S = 180.0
"""Seconds that the agents may take to start: a shared file system is slow when all nodes read one environment."""
POLL_S = 0.05
STOP_S = 60.0
MARGIN_S = 30.0
"""Seconds before the end of the allocation at which a driver that still runs is ended."""
TERM_S = 10.0
"""Seconds from SIGTERM to the end of the driver. Agents and workers have SIGTERM too, and SLURM kills all of them after
its KillWait, 30 s in most places."""
END_S = 5.0
"""Seconds that a driver, a master or a step may take to end, once there is nothing left for it to do."""
OUTPUT_S = 20.0
"""Least seconds that a driver has, at the time limit, for the last output of workers that have saved."""
AGAIN_S = 5.0
"""Period at which jobs are suspended that a driver submits although the allocation ends."""
MASTER_BACKOFF = Backoff()
MAX_MASTER_RESTARTS = 10


class Execution:
    """Runs one allocation, in the main thread.

    Args:
        nodes: least number of nodes.
        spare_from: nodes beyond so many are in reserve.
        agents: options of the agents.
        requeues: restarts at which the allocation goes back into SLURM's queue no more; None: no limit.
        command: driver; empty: none, until Ctrl-C.
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
        self._requeues = requeues
        self._command = command
        self._unified = unified
        self._key_file = folder / commands.KEY_NAME
        self._address_file = folder / commands.ADDRESS_NAME
        self._address = ""
        self._master: Daemon | None = None
        self._num_master_restarts = 0
        self._agents: list[subprocess.Popen[bytes]] = []
        """Steps of srun, one for each component of a heterogeneous job."""
        self._doctor: subprocess.Popen[bytes] | None = None
        self._driver: subprocess.Popen[bytes] | None = None
        self._asked: dict[int, float] = {}
        """Signals that came, with the time of the first of each."""
        self._is_unfinished = False

    def run(self) -> int:
        """Run it to its end, and return the driver's exit code, or 75 if its job waits for the next allocation."""
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
            if not self._is_unfinished:
                return code
            self._requeue()
            return os.EX_TEMPFAIL
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._asked.setdefault(number, time.monotonic())

    @property
    def _is_time_over(self) -> bool:
        """True if the allocation ends by its time limit. After SIGTERM it is SLURM that starts it again, or nobody."""
        return signal.SIGUSR1 in self._asked and signal.SIGTERM not in self._asked

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
        if not self._allocation.num_restarts:  # what lies here is of another job, if SLURM counts from 1 again
            shutil.rmtree(self._folder / "master", ignore_errors=True)
            self._key_file.unlink(missing_ok=True)
        if not self._key_file.exists():
            write_key(self._key_file, new_key())
        address = self._own_address()
        self._start_master(f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0")
        self._start_agents()
        # Each node says what is wrong with it, if anything is, while the agents start.
        words = [*self._in_step(self._allocation.steps()[0]), "doctor", "--host", "--quiet"]
        with (self._folder / "srun.log").open("ab") as log:
            self._doctor = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=2, stderr=log, start_new_session=True
            )
        self._await_nodes()

    def _in_step(self, step: Sequence[str]) -> list[str]:
        return self._options.in_step(step, self._unified, self._folder.parent.parent, os.environ)

    def _own_address(self) -> str:
        """Return this host's address on the chosen interface, else towards another node, or towards the only one."""
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
        """Wait until every node is there, or enough of them are and the others take too long."""
        deadline, number, total = time.monotonic() + READY_S, 0, self._allocation.num_nodes
        with self._connect() as connection:
            while number < total and not (number >= self._nodes and time.monotonic() > deadline - READY_S / 2):
                self._check_start(deadline, f"{number} of {_nodes(total)} came, and the job needs {self._nodes}")
                self._revive_master()
                self._check_agents()
                with contextlib.suppress(UnifiedError):
                    nodes = connection.ask(ListNodes(), NodeList, timeout_s=1.0).nodes
                    own = [node for node in nodes if node.labels.get("slurm_job") == self._allocation.slurm_id]
                    number = sum(node.state == NodeState.ALIVE for node in own)
                time.sleep(2 * POLL_S)
        _say(f"{number} of {_nodes(total)} joined {self._address}; logs: {self._folder}")

    def _check_start(self, deadline: float, waits_for: str) -> None:
        if self._driver is None and signal.SIGUSR1 in self._asked:
            raise ClusterError(
                "the time limit of the allocation is too short: SLURM announced its end before the cluster was up."
            )
        if self._driver is None and self._asked:
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
        """Run the driver to its end."""
        environment = {**self._environment(), MASTER_VARIABLE: self._address, STORY_FOLDER: str(self._folder)}
        try:
            self._driver = driver = subprocess.Popen(
                self._command, env=environment, preexec_fn=lambda: process.die_with_parent(signal.SIGTERM)
            )
        except OSError as error:
            raise UsageError(f"{self._command[0]} cannot be started: {error.strerror}.") from None
        suspend_at, end_at, last = 0.0, float("inf"), [signal.SIGTERM, signal.SIGKILL]
        while (code := driver.poll()) is None:
            self._watch()
            now = time.monotonic()
            if self._ends and now >= suspend_at:
                end_at = self._suspend() if not suspend_at else end_at
                suspend_at = now + AGAIN_S
            if signal.SIGTERM in self._asked and len(last) == 2:
                end_at, last = self._asked[signal.SIGTERM] + TERM_S, last[1:]  # SLURM has sent the other one
            if now > end_at and last:  # its job waits, and the driver does not end by itself
                driver.send_signal(last.pop(0))
                end_at = now + END_S
        was_ended = len(last) < 2 and code != 0
        self._is_unfinished = code == os.EX_TEMPFAIL or (self._ends and (was_ended or self._has_suspended()))
        return 128 - code if code < 0 else code

    def _stay(self) -> int:
        """Keep the cluster until a signal ends it."""
        _say(
            f"use it with:  export {MASTER_VARIABLE}={self._address} {KEY_VARIABLE}={self._key_file}\n"
            f"or:  unified --slurm {self._allocation.slurm_id} nodes     (Ctrl-C ends the cluster)"
        )
        while not self._asked:
            self._watch()
        if self._ends:
            end_at = self._suspend()
            with contextlib.suppress(UnifiedError, TimeoutError), self._connect() as connection:
                suspend(connection, "", "the allocation ends", end_at - time.monotonic())
        return 0

    @property
    def _ends(self) -> bool:
        """True once the allocation ends."""
        return bool(self._asked.keys() - {signal.SIGINT})

    def _watch(self) -> None:
        self._revive_master()
        self._check_agents()
        time.sleep(POLL_S)

    def _revive_master(self, within_s: float = 0.0) -> None:
        """Start the master again, at its address and with its state, if it ends within a time."""
        assert self._master is not None
        if not self._master.wait(within_s):
            return
        if self._num_master_restarts >= MAX_MASTER_RESTARTS:
            raise ClusterError(f"the master ended again and again; the last time it {self._master.last_words()}")
        time.sleep(MASTER_BACKOFF.delay_s(self._num_master_restarts))
        self._num_master_restarts += 1
        self._start_master(self._address)

    def _check_agents(self) -> None:
        """Notice a step that has ended: preemption sends SIGTERM to steps first, and their agents leave in order."""
        codes = [agents.poll() for agents in self._agents]
        if self._ends or codes.count(None) == len(codes):
            return
        if any(codes):
            words = last_lines(self._folder / "srun.log")
            raise ClusterError(f"all agents of a step have ended (srun: exit code {max(filter(None, codes))}):{words}")
        _say("SLURM has ended the agents, as for a preemption")
        self._note(signal.SIGUSR1, None)

    def _suspend(self) -> float:
        """Have all jobs save and wait; return the time at which the driver is ended."""
        slurm_id = self._allocation.slurm_id
        left_s = self._left_s() if self._is_time_over else None
        restart = self._allocation.num_restarts + 1
        limit = f" of {self._requeues}" if self._requeues is not None else ""
        reason = f"SLURM ends allocation {slurm_id}"
        if not self._is_time_over:
            reason += " (SIGTERM, as for scancel, a requeue, a preemption)"
            self._revive_master(within_s=1.0)  # SLURM sends SIGTERM to all processes of a job, the master among them
        elif left_s is not None:
            reason += f" in {left_s:.0f} s"
        if self._is_time_over and self._may_requeue:
            reason += f"; it goes on in restart {restart}{limit}"
        _say(reason)
        try:
            with self._connect() as connection:
                suspend(connection, "", reason, None)
        except UnifiedError as error:
            _say(str(error))
        return time.monotonic() + max(OUTPUT_S, (left_s or 0.0) - MARGIN_S)

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

    @property
    def _may_requeue(self) -> bool:
        return self._requeues is None or self._allocation.num_restarts < self._requeues

    # End

    def _stop(self) -> None:
        """End driver, agents and master, in this order, whatever fails."""
        quick = signal.SIGTERM in self._asked
        for child in (self._driver, self._doctor):
            if child is not None and child.poll() is None:
                child.terminate()
                _wait(child, END_S)
        for agents in self._agents:
            with contextlib.suppress(OSError):
                assert agents.stdin is not None
                agents.stdin.close()
        for agents in self._agents:
            if not _wait(agents, END_S if quick else STOP_S, is_killed=False):
                agents.terminate()
                _wait(agents, END_S)
        if self._master is not None:
            Daemon.end_all([self._master], END_S)
        with contextlib.suppress(OSError):
            self._address_file.unlink(missing_ok=True)
            if not self._is_unfinished:
                self._key_file.unlink(missing_ok=True)

    def _requeue(self) -> None:
        """Put the allocation back into SLURM's queue, if its time was over."""
        slurm_id = self._allocation.slurm_id
        if self._ends and not self._is_time_over:
            return
        if not self._ends:
            _say(f"the job is suspended, and this allocation ends: `scontrol requeue {slurm_id}` has the job go on")
        elif not self._may_requeue:
            _say(f"the job has not ended, and --requeues {self._requeues} are used up")
        else:
            commands.requeue(slurm_id)


def _wait(child: subprocess.Popen[bytes], timeout_s: float, *, is_killed: bool = True) -> bool:
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        if is_killed:
            child.kill()
            child.wait()
        return False
    return True


def _say(text: str) -> None:
    print("\n".join(f"unified slurm: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number != 1 else ''}"
