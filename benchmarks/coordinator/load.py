"""Workers that exist on paper: processes of `coordinator.py` that ask a master, or a bare echo, as a hundred would.

Each worker has a connection of its own and one question on its way at a time. What is asked and what has to be
answered is encoded before the clock runs; each answer is compared, byte by byte, with what it has to be.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import NamedTuple, Self

import msgspec
import zmq

from unified.errors import UnifiedError
from unified.protocol.coordinator import BarrierResponse, WaitBarrier
from unified.protocol.framing import Codec

Socket = zmq.Socket[bytes]
LOADERS = 2
"""Processes; what they do themselves is not to be what limits the master."""
DEADLINE_S = 30.0
WARM_UP = 20
_codec: Codec[BarrierResponse] = Codec(BarrierResponse)
_barrier: Barrier | None = None


class Said(NamedTuple):
    """What one worker asks again and again, and the only right answer. Both are bodies, without their headers."""

    request: bytes
    answer: bytes


class WrongAnswerError(Exception):
    """The answer was another than the one that had to come."""


BROKEN = (WrongAnswerError, zmq.ZMQError, multiprocessing.TimeoutError, TimeoutError, RuntimeError, UnifiedError)
"""What spoils a round."""


class Loaders:
    """`LOADERS` processes that begin together. Use it as a context manager."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = spawn.Pool(LOADERS, initializer=_join, initargs=(spawn.Barrier(LOADERS),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def rate(self, address: str, said: Sequence[Said], times: int) -> float:
        """Answers a second, when each worker asks so often."""
        parts = [(address, said[loader::LOADERS], times) for loader in range(LOADERS)]
        found = self._pool.starmap_async(storm, parts, chunksize=1).get(DEADLINE_S * 2)
        return len(said) * times / (max(ended for _, ended in found) - min(began for began, _ in found))


def storm(address: str, said: Sequence[Said], times: int) -> tuple[float, float]:
    """Each of these workers asks so often, the next time as soon as it is answered. When that began and ended."""
    with connected(address, len(said)) as sockets:
        turns = [(socket, each.request, each.answer) for socket, each in zip(sockets, said, strict=True)]
        for socket, each in zip(sockets, said, strict=True):
            ask(socket, each, 1)
        if _barrier is not None:
            _barrier.wait(DEADLINE_S)
        began = time.monotonic()  # the same clock in all processes
        head = header(1)
        for socket, request, _ in turns:
            socket.send(head, zmq.SNDMORE)
            socket.send(request)
        for number in range(1, times + 1):
            next_head = header(number + 1)
            for socket, request, answer in turns:
                if socket.recv() != head or socket.recv() != answer:
                    raise WrongAnswerError(f"to question {number}")
                if number < times:
                    socket.send(next_head, zmq.SNDMORE)
                    socket.send(request)
            head = next_head
        return began, time.monotonic()


def latencies(address: str, said: Said, times: int) -> list[float]:
    """Seconds from a question to its answer, one at a time, on one connection."""
    taken = []
    with connected(address, 1) as (socket,):
        for number in range(times + WARM_UP):
            began = time.perf_counter()
            ask(socket, said, number)
            taken.append(time.perf_counter() - began)
    return taken[WARM_UP:]


def barriers(address: str, arrivals: Sequence[WaitBarrier], times: int) -> tuple[list[float], bytes]:
    """All arrive at once, so often. Seconds from the first arrival's sending to the last answer, and one answer."""
    taken, answer = [], b""
    with connected(address, len(arrivals)) as sockets:
        for number in range(1, times + WARM_UP + 1):
            bodies = [_codec.encode_body(msgspec.structs.replace(each, arrival=number)) for each in arrivals]
            head = header(number)
            began = time.perf_counter()
            for socket, body in zip(sockets, bodies, strict=True):
                socket.send(head, zmq.SNDMORE)
                socket.send(body)
            answers = [socket.recv_multipart() for socket in sockets]
            taken.append(time.perf_counter() - began)
            ((first, answer), count), *others = Counter(map(tuple, answers)).items()
            released = _codec.decode_body(answer)
            if others or first != head or released.released_by != "arrived" or len(released.arrived) != count:
                raise WrongAnswerError(f"at barrier {number}: {released}")
    return taken[WARM_UP:], answer


def ask(socket: Socket, said: Said, number: int) -> None:
    socket.send(header(number), zmq.SNDMORE)
    socket.send(said.request)
    if (socket.recv(), socket.recv()) != (header(number), said.answer):
        raise WrongAnswerError(f"to question {number}")


def header(number: int) -> bytes:
    return _codec.encode_header(number)


@contextmanager
def connected(address: str, number: int) -> Iterator[list[Socket]]:
    """So many connections. One that gets no answer for `DEADLINE_S` raises `zmq.Again`."""
    context: zmq.Context[Socket] = zmq.Context()
    try:
        sockets = [context.socket(zmq.DEALER) for _ in range(number)]
        for socket in sockets:
            socket.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
            socket.connect(address)
        yield sockets
    finally:
        context.destroy(0)


@contextmanager
def echo(answer: bytes, gather: int = 1) -> Iterator[str]:
    """A bare ROUTER in a process of its own, its one thread blocked in `recv`. Yields its address.

    Args:
        answer: what all are answered, under the header that they sent.
        gather: from so many questions on, all who asked are answered.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve_echo, args=(theirs, answer, gather), daemon=True)
    process.start()
    try:
        if not ours.poll(DEADLINE_S):
            raise TimeoutError("the bare echo did not start")
        yield ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve_echo(pipe: Connection, answer: bytes, gather: int) -> None:
    context: zmq.Context[Socket] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    pipe.send(router.get_string(zmq.LAST_ENDPOINT))
    asked: list[tuple[bytes, bytes]] = []
    while True:
        peer, head, _ = router.recv(), router.recv(), router.recv()
        asked.append((peer, head))
        if len(asked) == gather:
            for peer, head in asked:
                router.send(peer, zmq.SNDMORE)
                router.send(head, zmq.SNDMORE)
                router.send(answer)
            asked.clear()


def _join(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier
