"""The lease keeper: a small process beside the agent that nothing in the agent can hold up.

It renews the lease while the agent is busy or stopped, tells the master at once when the agent's process has ended, and
ends the node's workers before the master starts them elsewhere. The agent forks the keeper before it starts threads.
The agent's loop writes its state into a page of shared memory; a socket pair shows each process the other's end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import select
import signal
import socket
import time
from typing import assert_never

import zmq

from unified import process
from unified.bus.shm.files import Sweeper
from unified.config.addresses import split_address
from unified.errors import ProtocolError
from unified.protocol.agent_master import (
    AgentDied,
    AgentPulse,
    AgentToMaster,
    HeartbeatSeen,
    agent_to_master,
    master_to_agent,
)
from unified.security.handshakes import KeyChoice
from unified.security.keys import ClusterKey, key_text, learn, parse_key
from unified_agent.core.lease import NodeLease, request_id_at
from unified_agent.core.lease_keeping import Contact, KeeperAction, Kill, LeaseKeeping, Probe, Renew, TellAgent
from unified_agent.environment import NodeFacts
from unified_agent.master_channel import make_socket
from unified_agent.orphans import kill_processes, sweep

log = logging.getLogger("unified_agent")
DEATH_S = 5.0
"""Time for which the keeper tries to report its agent's death to the master."""
DEATH_EVERY_S = 0.2
_MAX_KEY = 4096
PROBE_S = 3.0
"""Timeout of a probe; a fifth of the lease if that is shorter."""
_GREETING = b"\xff" + 4 * b"\r\n" + b"\x7f"
"""First bytes of a ZeroMQ connection. The master's process answers them, unless it is stopped. Their eight free bytes
end a line, so that other servers answer or hang up, too: an HTTP server waits for a line."""


class _Page:
    """The lease in shared memory: only the agent writes it, and the keeper reads it. A field is written atomically."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")

    def write(self, lease: NodeLease) -> None:
        for index, number in enumerate(lease):
            self._numbers[index] = number

    def read(self) -> NodeLease:
        return NodeLease(*self._numbers[: len(NodeLease._fields)])


class LeaseKeeper:
    """The agent's handle on its keeper; the constructor starts the keeper."""

    def __init__(self, facts: NodeFacts, key: ClusterKey | None) -> None:
        self._page = _Page()
        self._ours, theirs = socket.socketpair()
        self._agent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(facts, key, self._page, theirs)
        theirs.close()
        self._ours.setblocking(False)
        self._is_alive = True

    @property
    def descriptor(self) -> int:
        return self._ours.fileno()

    def note(self, lease: NodeLease) -> None:
        """Tell the keeper what the agent knows, and that its loop turns."""
        self._page.write(lease)

    def replace_key(self, key: ClusterKey) -> None:
        """Tell the keeper that the cluster's key has a successor."""
        with contextlib.suppress(OSError):  # it has ended
            self._ours.send(key_text(key).encode())

    def receive(self) -> str:
        """Return the reason why the workers have to end; empty if the keeper itself has ended."""
        try:
            return self._ours.recv(4096).decode()
        except OSError:
            return ""

    def reaped(self, code: int) -> None:
        """Note that its exit was seen: another process may get its pid from now on."""
        self._is_alive = False

    def close(self, *, is_orderly: bool) -> None:
        """End the keeper; if the agent broke down, let the keeper tell the master first."""
        if is_orderly and self._is_alive:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._ours.close()


def _live(facts: NodeFacts, key: ClusterKey | None, page: _Page, agent: socket.socket) -> None:
    """Run the keeper until the agent ends; then end the process."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the agent's end ends the keeper
        os.setsid()
        process.set_title("unified-lease")
        process.set_command_line(f"unified lease keeper of node {facts.node}")
        own = agent.detach()
        process.close_all_but([own])
        _Keeper(facts, key, page, socket.socket(fileno=own)).run()
    except BaseException:
        log.exception("event=lease-keeper-broken")
    finally:
        os._exit(0)


class _Keeper:
    """The process itself: a loop around `LeaseKeeping`."""

    def __init__(self, facts: NodeFacts, key: ClusterKey | None, page: _Page, agent: socket.socket) -> None:
        self._facts = facts
        self._key = key
        self._choice = KeyChoice(key)
        self._page = page
        self._agent = agent
        found = process.facts(facts.pid)
        self._start_ticks = found.start_ticks if found is not None else 0
        self._core = LeaseKeeping()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._master: zmq.Socket[bytes] | None = None
        self._probe: socket.socket | None = None
        self._probe_until = 0.0
        self._has_greeted = False
        self._target: tuple[int, tuple[object, ...]] | None = None
        """Family and address of the master's port, looked up while the network works."""
        self._poller = zmq.Poller()
        self._poller.register(agent.fileno(), zmq.POLLIN)

    def run(self) -> None:
        lease = self._page.read()
        while True:
            ready = dict(self._poller.poll(max(1, int(1000 * self._core.next_look_s(lease)))))
            if self._agent.fileno() in ready and not self._is_agent_there():
                break
            lease = self._page.read()
            if lease.lease_s and self._master is None:
                self._connect()
            self._read_answers()
            self._read_probe()
            for action in self._core.step(time.monotonic(), lease):
                self._perform(action, lease)
        self._tell_death()

    def _is_agent_there(self) -> bool:
        """Return True if the agent runs; its only message is the successor of the cluster's key."""
        try:
            said = self._agent.recv(_MAX_KEY)
        except OSError:
            return False
        learn(parse_key(said.decode()))
        return bool(said)

    def _perform(self, action: KeeperAction, lease: NodeLease) -> None:
        match action:
            case Renew():
                if action.on_new_connection:
                    self._connect()
                self._send(AgentPulse(node=self._facts.node, incarnation=self._facts.incarnation), action.request_id)
            case Probe():
                self._start_probe(min(PROBE_S, lease.lease_s / 5))
            case TellAgent():
                with contextlib.suppress(OSError):
                    self._agent.send(action.reason.encode(), socket.MSG_DONTWAIT)
            case Kill():
                self._kill(action)
            case _:
                assert_never(action)

    def _kill(self, order: Kill) -> None:
        if order.who == "agent":
            os.kill(self._facts.pid, signal.SIGKILL)
        killed = self._kill_workers(with_snapshots=order.who == "agent")  # a running agent still serves snapshots
        if killed or order.who == "agent":
            text = f"{order.reason}; ended {len(killed)} processes"
            log.error("event=lease-ended reason=%r", f"{text} and the agent" if order.who == "agent" else text)

    def _kill_workers(self, *, with_snapshots: bool = True) -> list[int]:
        facts = self._facts
        return kill_processes(facts.node, facts.incarnation, self._start_ticks, with_snapshots=with_snapshots)

    # The master

    def _connect(self) -> None:
        if self._master is not None:
            self._poller.unregister(self._master)
            self._master.close()
            self._choice.failed()
        self._master = make_socket(self._context, self._key, self._choice.pick())
        self._poller.register(self._master, zmq.POLLIN)
        self._master.connect(self._facts.master)
        if self._target is None:
            self._look_up()

    def _look_up(self) -> None:
        found = split_address(self._facts.master)
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(found.bare_host, found.port, type=socket.SOCK_STREAM)[0]
            self._target = family, address

    def _send(self, message: AgentToMaster, request_id: int) -> None:
        if self._master is not None:
            with contextlib.suppress(zmq.Again):  # no connection
                self._master.send_multipart(agent_to_master.encode(message, request_id), zmq.DONTWAIT)

    def _read_answers(self) -> int:
        """Handle the master's messages; return the id of the newest request that it answered; 0: none."""
        newest = 0
        while self._master is not None:
            try:
                request_id, message = master_to_agent.decode(self._master.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            except ProtocolError:
                continue  # the agent gets unreadable messages, too, and reports them
            if isinstance(message, HeartbeatSeen):
                self._choice.succeeded()
                self._core.answered(request_id)
                newest = max(newest, request_id)
                if self._probe_until:  # the network works, and the master may have another address by now
                    self._probe_until = 0.0
                    self._look_up()
        return newest

    def _start_probe(self, within_s: float) -> None:
        if self._probe is not None or self._target is None:
            return
        family, address = self._target
        self._probe = socket.socket(family, socket.SOCK_STREAM)
        self._probe.setblocking(False)
        self._probe_until, self._has_greeted = time.monotonic() + within_s, False
        if (error := self._probe.connect_ex(address)) not in (0, errno.EINPROGRESS):
            self._end_probe(Contact.REFUSED if error == errno.ECONNREFUSED else Contact.NONE)

    def _read_probe(self) -> None:
        if self._probe is None:
            return
        readable, writable, _ = select.select([self._probe], [self._probe], [], 0)
        try:
            if writable and not self._has_greeted:
                self._probe.sendall(_GREETING)
                self._has_greeted = True
            if readable:
                self._end_probe(Contact.ACCEPTED if self._probe.recv(1) == _GREETING[:1] else Contact.NONE)
            elif time.monotonic() > self._probe_until:
                self._end_probe(Contact.ACCEPTED if self._has_greeted else Contact.NONE)
        except ConnectionRefusedError:
            self._end_probe(Contact.REFUSED)
        except OSError:
            self._end_probe(Contact.NONE)

    def _end_probe(self, found: Contact) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
            self._core.contact(time.monotonic(), found)

    def _tell_death(self) -> None:
        """Kill the workers and remove their shared memory, then tell the master that the agent has ended."""
        self._kill_workers()
        sweep(Sweeper(), is_last=True)
        facts = self._facts
        word = AgentDied(node=facts.node, incarnation=facts.incarnation, reason=f"its agent (pid {facts.pid}) ended")
        began = time.monotonic()
        while self._master is not None and time.monotonic() < began + DEATH_S:
            self._send(word, request_id_at(time.monotonic()))
            self._master.poll(int(1000 * DEATH_EVERY_S))
            if self._read_answers() >= request_id_at(began):  # not an answer to an earlier pulse
                break
