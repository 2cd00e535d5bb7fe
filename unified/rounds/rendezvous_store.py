"""Rendezvous stores: every elastic round gets a TCPStore of its own, opened on request in the job's store host.

The store host is a process of its own, so that no store dies with a rank.

One store with a prefix for each round would not be enough. Our own `init_process_group` could use a prefix, but a plain
`init_process_group()` in a user's script goes through torch's `env://`. Since torch 2.13 that connects to
``MASTER_ADDR:MASTER_PORT`` and uses no prefix for the attempt (`torch/distributed/rendezvous.py`: "We create a new
TCPStore for every retry so no need to add prefix for each attempt"). In a store that outlives the round, a restarted
rank would read the address of a dead peer and hang. Replacing torch's ``env`` handler or intercepting
`init_process_group` would be patching torch. A store for each round is what torch itself expects. It costs 2 ms, and
serves libraries that read ``MASTER_PORT``, too.

Ranks request a store through the job's store (the port in RunOrder). A request is one atomic `compare_set`: a rank that
is killed meanwhile leaves either a whole request or none. The host waits for the slots in turn.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from unified.config import settings
from unified.config.ports import bind_free
from unified.errors import ClusterError, EntryPointError
from unified.protocol.agent_master import RunOrder

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

KEPT_ROUNDS = 2
"""Stores of one role that stay open: the newest round's, and the last round's, whose ranks may still be leaving."""
STORE_WITHIN_S = 300.0
"""torch's own limit for one operation of a store."""
_SLOW_S = 2.0
_NEXT_SLOT = "unified/next-slot"
"""Key of the next free slot, kept by the host so that a rank need not try all slots from the first."""


def needs_no_torch() -> bool:
    """Return True if the programs of this job, by their text, do not use torch: they have no rounds."""
    return os.environ.get(settings.PRELOAD) == "none"


def require_torch(role: str) -> None:
    """Raise `EntryPointError` if torch is missing: an elastic role needs it."""
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise EntryPointError(
            f"role {role} is elastic, which needs torch, and {sys.executable} has none: "
            "pip install 'unified-runtime[torch]' there."
        ) from error
    if not distributed.is_available():
        raise EntryPointError(f"role {role} is elastic, and the torch of {sys.executable} has no torch.distributed.")


class RoundStores:
    """Stores of the host: the job's, and one for each requested round; stores that no rank needs are closed.

    Args:
        address: of this node, the only one at which the stores listen, since every client may read and write.
        ports: by role, the port of its rounds' stores; 0, or no such role: any free port.
        listener: of the job's store, if it is there already.
    """

    def __init__(self, address: str, ports: Mapping[str, int], listener: socket.socket | None = None) -> None:
        self._address = address
        self._fixed = ports
        self._main = self._open(listener or listen(address, 0))
        self._slot = 1
        self._main.set(_NEXT_SLOT, "1")
        self._ports: dict[str, int] = {}
        self._stores: dict[str, deque[TCPStore]] = {}

    @property
    def port(self) -> int:
        """Port of the job's store."""
        return int(self._main.port)

    def serve_one(self) -> None:
        """Wait for the next request, at most a day, and answer it."""
        from torch.distributed import DistNetworkError, DistStoreError

        try:
            self._main.wait([_slot(self._slot)], timedelta(days=1))
        except DistStoreError:
            return
        role, _, prefix = self._main.get(_slot(self._slot)).decode().partition("\n")
        self._slot += 1
        self._main.set(_NEXT_SLOT, str(self._slot))
        if prefix not in self._ports:
            try:
                self._ports[prefix] = self._open_round(role)
            except (OSError, DistNetworkError) as error:
                reason = f"port {self._fixed.get(role, 0)} of {self._address} cannot be used: {error}"
                self._main.set(_port_key(prefix), reason.splitlines()[0])
                return
        self._main.set(_port_key(prefix), str(self._ports[prefix]))

    def _open_round(self, role: str) -> int:
        kept = self._stores.setdefault(role, deque(maxlen=KEPT_ROUNDS))
        port = self._fixed.get(role, 0)
        if port:
            kept.clear()  # a fixed port: the store of the last round must close first
        kept.append(self._open(listen(self._address, port)))
        return int(kept[-1].port)

    def _open(self, listener: socket.socket) -> TCPStore:
        import torch.distributed as distributed

        port = listener.getsockname()[1]
        return distributed.TCPStore(  # type: ignore[attr-defined]  # as above
            self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def listen(address: str, port: int) -> socket.socket:
    """Return a listener at this address only; torch's own would listen at all addresses of the host."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return bind_free(lambda free: socket.create_server((str(where[0]), free), family=family), port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    print(f"unified: {address} is not an address of this host: the store listens at all addresses.", file=sys.stderr)
    return bind_free(lambda free: socket.create_server(("", free), family=family), port)


def open_round(order: RunOrder, role: str, timeout_s: float) -> int:
    """Return the port, at `order.store_host`, of this round's store. Rank 0 requests it, all wait for the answer."""
    if needs_no_torch():
        return order.store_port
    from torch.distributed import DistError  # only elastic roles need torch

    begun = time.monotonic()
    where = f"{order.store_host}:{order.store_port}"
    try:
        main = connect(order.store_host, order.store_port, timeout_s)
        connected_s = time.monotonic() - begun
        if order.rank == 0:
            _ask(main, f"{role}\n{order.store_prefix}")
        answer = main.get(_port_key(order.store_prefix)).decode()
    except DistError as error:
        raise ClusterError(
            f"round {order.round} of role {role} did not begin: rank {order.rank} waited "
            f"{time.monotonic() - begun:.1f} s for the job's store at {where}. Check that the job's store process "
            "is running, and that rank 0 reached this point."
        ) from error
    if connected_s > _SLOW_S:
        print(
            f"unified: connecting to the store at {where} took {connected_s:.1f} s; torch looks up its peers' names, "
            "so a name server that does not answer is the usual cause (put the nodes into /etc/hosts).",
            file=sys.stderr,
        )
    if not answer.isdecimal():
        raise ClusterError(f"round {order.round} of role {role} did not begin: {answer}. Choose another --master-port.")
    return int(answer)


def connect(host: str, port: int, timeout_s: float = STORE_WITHIN_S) -> TCPStore:
    """Return a client of a TCPStore; connecting, and each operation, waits at most `timeout_s`."""
    import torch.distributed as distributed

    return distributed.TCPStore(  # type: ignore[attr-defined]  # as above
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def _ask(main: TCPStore, request: str) -> None:
    slot = int(main.get(_NEXT_SLOT))
    while main.compare_set(_slot(slot), "", request).decode() != request:
        slot += 1  # another role was quicker


def _slot(number: int) -> str:
    return f"unified/round-request/{number}"


def _port_key(prefix: str) -> str:
    return f"unified/round-port/{prefix}"
