"""What no bus can beat on this machine: bare sockets between two processes, and copies in memory.

``floor.py zmq|socket|memory`` prints one JSON line a figure.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import zmq

from benchmarks.bus import work
from unified.tensors.copy import Copy, copy_memory, num_cores
from unified.worker.fork_setup import keep_freed
from unified_agent.spawn import TUNABLES, last_cache_bytes, tunables

Array = np.ndarray[Any, np.dtype[np.uint8]]
MESSAGE = b"x" * 64
"""About as much as an empty call has to say."""
ALL: list[str] = []
"""Rows: of what is asked for on the command line these floors know nothing."""


def zmq_floor() -> dict[str, float]:
    """A PUSH and a PULL on each side over ``ipc``, each process with its one thread blocked in `recv`."""
    values: dict[str, float] = {}
    with _zmq_pair(copies=True) as (outgoing, incoming):

        def call() -> None:
            outgoing.send(MESSAGE)
            incoming.recv()

        def burst() -> None:
            for _ in range(work.BURST):
                outgoing.send(MESSAGE)
            for _ in range(work.BURST):
                incoming.recv()

        values |= _latency(call)
        values["async_1_1"] = work.pipelined(burst)
    with _zmq_pair(copies=False) as (outgoing, incoming):
        for each in work.array_passes(ALL):
            array = np.ones(each.mib * work.MIB, np.uint8)

            def send(array: Any = array) -> None:
                outgoing.send(array, copy=False)
                incoming.recv()

            values |= [each.read("arg", send)]
    return values


def socket_floor() -> dict[str, float]:
    """One Unix stream socket, both ends blocked in `recv`."""
    ours, theirs = socket.socketpair()
    with ours, child(_socket_echo, theirs):
        theirs.close()

        def call() -> None:
            ours.sendall(MESSAGE)
            ours.recv(1024)

        values = _latency(call)
        ours.shutdown(socket.SHUT_WR)
    return values


def environment() -> dict[str, str]:
    """As an agent gives it to our workers, whose copies would else beat the floor."""
    return {**os.environ, TUNABLES: tunables(os.environ.get(TUNABLES, ""), last_cache_bytes())}


def memory_floor() -> dict[str, float]:
    """An argument costs one copy into memory that is there already; a result has to be made first."""
    values: dict[str, float] = {}
    keep_freed(os.environ)
    for each in work.array_passes(ALL):
        nbytes = each.mib * work.MIB
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

        def copy(source: Array = source, target: Array = target) -> None:
            copy_memory([Copy(target.ctypes.data, source.ctypes.data, target.nbytes)], num_cores())

        def make_and_copy(target: Array = target, copy: Callable[[Array, Array], None] = copy) -> None:
            copy(np.ones(len(target), np.uint8), target)

        values |= [each.read("arg", copy), each.read("ret", make_and_copy)]
        if each.is_again and each.mib == work.FANOUT_MIB:
            values["fanout"] = work.WORKERS * values[f"arg_{each.mib}MiB_warm"]
    return values


def _latency(call: Callable[[], None]) -> dict[str, float]:
    p50, p99 = work.latency_us(call)
    return {"sync_p50": p50, "sync_p99": p99}


Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@contextmanager
def _zmq_pair(copies: bool) -> Iterator[Sockets]:
    """One to send on and one to receive on, with a second process at the other ends."""
    with (
        tempfile.TemporaryDirectory(prefix="unified-floor-") as folder,
        child(_zmq_echo, folder, copies),
        _zmq_sockets(f"ipc://{folder}/there", f"ipc://{folder}/back") as (outgoing, incoming),
    ):
        yield outgoing, incoming
        outgoing.send(b"")


@contextmanager
def _zmq_sockets(there: str, back: str) -> Iterator[Sockets]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outgoing, incoming = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        incoming.bind(back)
        outgoing.connect(there)
        yield outgoing, incoming
    finally:
        outgoing.close()
        incoming.close()
        context.term()


def _zmq_echo(folder: str, copies: bool) -> None:
    with _zmq_sockets(f"ipc://{folder}/back", f"ipc://{folder}/there") as (outgoing, incoming):
        while _length(incoming, copies):
            outgoing.send(MESSAGE)


def _length(incoming: zmq.Socket[bytes], copies: bool) -> int:
    return len(incoming.recv()) if copies else len(incoming.recv(copy=False).buffer)


def _socket_echo(theirs: socket.socket) -> None:
    while message := theirs.recv(1024):
        theirs.sendall(message)


@contextmanager
def child(function: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """A second process that echoes until it is told to end."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args, daemon=True)
    process.start()
    try:
        yield process
        process.join(10)
    finally:
        if process.is_alive():
            process.kill()
            process.join()


FLOORS = {"zmq": zmq_floor, "socket": socket_floor, "memory": memory_floor}


if __name__ == "__main__":
    for name, value in FLOORS[sys.argv[1]]().items():
        work.say(name, value)
