"""Broken process groups: freeing a thread that is stuck in a collective, and leaving the group.

NCCL has an abort of its own. Gloo, as of torch 2.13, has none. After `ProcessGroup.abort` or `shutdown` a collective
still waits for a peer that will never answer (a host without power closes no connection), until the timeout of its
group, half an hour unless set. This module therefore shuts down Gloo's connections, and the collective raises as if a
peer had closed them.

The direction matters. Gloo's thread may read that a peer is ready to receive, and fail to write its answer. The
operation that it has just taken from its table then gets no error and waits on (`Pair::handleRemotePendingRecv` in
gloo/transport/tcp/pair.cc). A stuck rank therefore shuts down the *reading* side: its writes still go out. A rank that
is in no collective shuts down the *writing* side: its peers read all that was sent, and then the end of file.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_FUTEX = ("202", "98")
"""Numbers of the system call, on x86-64 and on Arm."""
_HUNG_UP = {6, 7, 8, 9, 11}
"""States of a TCP connection whose peer has hung up: time-wait, closed, close-wait, last-ack, closing."""
_LAST_DATA_RECV = 52
"""Offset in the kernel's `tcp_info` of the milliseconds since data came."""
_FDS = Path("/proc/self/fd")
_FLAGS = re.compile(r"^flags:\s*(\d+)", re.MULTILINE)
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*?\bino:([0-9a-f]+)", re.MULTILINE)


class Address(NamedTuple):
    host: str
    port: int


def abort_groups(stores: Collection[Address], num_peers: int) -> None:
    """Abort the work of this process in all process groups, also in the making of one. Any thread; may be repeated.

    Args:
        stores: stores at which a thread may wait while it makes a group; connections to them are shut down.
        num_peers: number of Gloo's connections to shut down, the longest silent ones first. One is often enough: the
            thread raises, and leaves the others in order.
    """
    _abort_devices()
    with contextlib.ExitStack() as opened:
        found = sorted(_gloo_connections(opened), key=_silence_ms, reverse=True)
        for connection in found[:num_peers]:
            _shut_down(connection, socket.SHUT_RD)
    if not stores:
        return
    addresses = {(host, store.port) for store in stores for host in _resolved(store.host)}
    for descriptor in os.listdir(_FDS):
        connected = _open(descriptor)
        if connected is not None:
            with connected, contextlib.suppress(OSError):
                host, port = connected.getpeername()[:2]
                if (_plain(host), port) in addresses:
                    _shut_down(connected, socket.SHUT_RD)


def hang_up(within_s: float) -> None:
    """Tell the peers of all process groups that this rank, which is in no collective, leaves. Wait until they hung up,
    too: otherwise a peer would be cut off while it still writes."""
    until = time.monotonic() + within_s
    with contextlib.ExitStack() as opened:
        found = list(_gloo_connections(opened))
        for connection in found:
            _shut_down(connection, socket.SHUT_WR)
        while any(_is_open(each) for each in found) and time.monotonic() < until:
            time.sleep(0.001)


def _is_open(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _HUNG_UP


def _silence_ms(connection: socket.socket) -> int:
    """Return for how long no data has come from the peer."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV + 4)
    except OSError:
        return 0
    return int.from_bytes(info[_LAST_DATA_RECV:], sys.byteorder)


def _abort_devices() -> None:
    """Abort the running work of NCCL, and of other backends that can abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    groups = list(distributed.distributed_c10d._world.pg_names)
    with contextlib.ExitStack() as together:
        if distributed.is_nccl_available():  # each communicator's abort may wait for the others' (pytorch #119797)
            for backend in _nccl_backends(groups[:1]):
                backend._group_start()
                together.callback(backend._group_end)
        for group in groups:
            with contextlib.suppress(RuntimeError):  # a group that is aborted already, or unused so far
                group.abort()


def _nccl_backends(groups: list[Any]) -> Iterator[Any]:
    import torch

    for group in groups:
        with contextlib.suppress(RuntimeError):  # the group has none for this device
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, torch.distributed.ProcessGroupNCCL):
                yield backend


def _gloo_connections(opened: contextlib.ExitStack) -> Iterator[socket.socket]:
    """Yield the connections that Gloo's event loops watch, under descriptors that `opened` closes.

    Each of Gloo's devices has an epoll descriptor that watches a listener and the connections to its peers. Other
    libraries of a worker (ZeroMQ, libuv, gRPC, Python) open epoll descriptors, too, but only Gloo leaves its own open
    across `exec`.
    """
    for descriptor in os.listdir(_FDS):
        with contextlib.suppress(OSError):
            if os.readlink(_FDS / descriptor) != "anon_inode:[eventpoll]":
                continue
            info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
            flags = _FLAGS.search(info)
            if flags is None or int(flags[1], 8) & os.O_CLOEXEC:
                continue
            found = [_open(number, int(inode, 16)) for number, inode in _WATCHED.findall(info)]
            watched = [opened.enter_context(each) for each in found if each is not None]
            listeners = [each for each in watched if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
            if listeners:  # not yielded: the end of one would end Gloo's process
                yield from (each for each in watched if each not in listeners)


def _open(descriptor: str, inode: int | None = None) -> socket.socket | None:
    """Return a TCP socket under a new descriptor, as the thread that owns the old one may close it at any time."""
    try:
        copy = os.dup(int(descriptor))
    except OSError:
        return None
    try:
        is_it = inode is None or os.fstat(copy).st_ino == inode
        opened = socket.socket(fileno=copy) if is_it else None
    except OSError:  # no socket
        opened = None
    if opened is None:
        os.close(copy)
    elif opened.type != socket.SOCK_STREAM or opened.family not in (socket.AF_INET, socket.AF_INET6):
        opened.close()
        opened = None
    return opened


def _shut_down(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)


def _resolved(host: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {_plain(str(found[4][0])) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return set()


def _plain(host: str) -> str:
    """Return the one form of an address that may be written in several ways."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def is_gloo_lost() -> bool:
    """Return True if a thread of Gloo waits for an operation, but has no connection left on which it could end.

    The operation was lost, as above. Idle threads of Gloo are not counted: they wait without a timeout.
    """
    with contextlib.ExitStack() as opened:
        if list(_gloo_connections(opened)):
            return False
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text().startswith("pt_gloo_run"):
                call = (thread / "syscall").read_text().split()
                if len(call) > 4 and call[0] in _FUTEX and int(call[4], 16) != 0:
                    return True
    return False
