"""TCP ports that this agent holds for workers, so that no other program of the host gets them."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import resource
import socket
from collections.abc import Callable, Iterable

from msgspec import structs

from unified.config.ports import HELD_PORTS, PORT_RANGE, port_range
from unified.errors import UsageError
from unified.job.names import num_ports, with_ports
from unified.protocol.records import JobWorkerIncarnation
from unified.protocol.worker_agent import PortsHeld
from unified_agent.core.messages import HoldPorts, StartWorker

log = logging.getLogger("unified_agent")
LINGER_S = 60.0
"""Time for which ports are held for a job without workers here: its restart may be delayed. Connections in TIME_WAIT,
which keep others from a port, last as long."""


class HeldPorts:
    """Ports by worker, for all its incarnations on this node. Each is held by a socket that is bound and never listens.

    The socket is bound without options, so that the kernel refuses a port that any other socket has. Afterwards it gets
    SO_REUSEADDR and SO_REUSEPORT: a server that sets one of them can listen on the port. The kernel still gives it to
    no other agent, and to nobody who connects or asks for any free port.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._held: dict[tuple[str, str], dict[int, socket.socket]] = {}
        self._left_at: dict[str, float] = {}
        """Time at which a job was first seen to be gone, by job; infinite: it is here."""
        self._looked_at = -math.inf

    def hold(self, job_id: str, worker: str, num: int) -> list[int]:
        """Return all ports of the worker in their order, `num` at least; UsageError: there are not enough."""
        held = self._held.get((job_id, worker), {})
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if num > len(held) and 2 * (sum(map(len, self._held.values())) + num - len(held)) > limit:
            raise UsageError(
                f"node {self._node} holds no more ports: they would use half of its agent's open files (ulimit -n "
                f"{limit}). Ask for fewer ports, or start the agent with a higher limit."
            )
        if num > len(held):
            self._held[job_id, worker] = held = held | self._more(job_id, worker, num - len(held))
            log.info("event=ports-held job=%s worker=%s ports=%s", job_id, worker, ",".join(map(str, held)))
        return list(held)

    def given(self, order: StartWorker) -> StartWorker:
        """Return the order with the worker's ports: those that its role names, and those that it had before."""
        launch = order.launch
        if launch.kind != "worker":
            return order
        role = launch.spec.role(launch.role)
        ports = self.hold(launch.job_id, launch.name, num_ports([*role.entry_point.argv, *role.envs.values()]))
        env = {name: with_ports(value, ports) for name, value in order.env.items()}
        return structs.replace(order, launch=structs.replace(launch, ports=ports), env=env)

    def answer(self, order: HoldPorts) -> PortsHeld:
        """Return the answer to a worker that wants ports."""
        job_id, worker, _ = order.incarnation
        try:
            return PortsHeld(num=order.num, ports=self.hold(job_id, worker, order.num))
        except (OSError, UsageError) as error:
            return PortsHeld(num=order.num, error=str(error))

    def keep(self, now: float, incarnations: Callable[[], Iterable[JobWorkerIncarnation]]) -> None:
        """Release the ports of jobs that have had no worker here for a while. Looks once a second at most."""
        if not self._held or now < self._looked_at + 1.0:
            return
        self._looked_at = now
        jobs = {incarnation.job_id for incarnation in incarnations()}
        left_at, self._left_at = self._left_at, {}
        for job, _ in self._held:
            self._left_at[job] = math.inf if job in jobs else min(now, left_at.get(job, now))
        self._release([worker for worker in self._held if now >= self._left_at[worker[0]] + LINGER_S])

    def close(self) -> None:
        """Release all ports."""
        self._release(list(self._held))

    def _release(self, workers: list[tuple[str, str]]) -> None:
        for held in [held for worker in workers for held in self._held.pop(worker).values()]:
            held.close()

    def _more(self, job_id: str, worker: str, num: int) -> dict[int, socket.socket]:
        block = port_range() or HELD_PORTS
        digest = hashlib.sha256(f"{self._node}/{job_id}/{worker}".encode()).digest()
        start = int.from_bytes(digest[:8]) % len(block)  # so that workers seldom try the same ports
        is_dual = socket.has_dualstack_ipv6()
        found: dict[int, socket.socket] = {}
        for port in (*block[start:], *block[:start]):
            if (held := _bound(port, is_dual=is_dual)) is not None:
                found[port] = held
                if len(found) == num:
                    return found
        for held in found.values():
            held.close()
        why = f"only {len(found)} of {block[0]} to {block[-1]} are free. Give its agent a wider {PORT_RANGE}"
        raise UsageError(f"node {self._node} has not {num} more ports for worker {worker} of job {job_id}: {why}.")


def _bound(port: int, *, is_dual: bool) -> socket.socket | None:
    """Return a socket that holds the port at all addresses; None if it is in use."""
    holder = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    try:
        if is_dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", port))
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return holder
