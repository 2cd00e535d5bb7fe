"""What the cluster key costs: ZeroMQ over tcp with and without CURVE, interleaved, on this machine's loopback.

Both sides are as the bus has them between hosts, one PULL and one PUSH each, without any of the bus on top. One host's
loopback has no network card in the way, so this is the highest price: on a network the slower of the two counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq
from rich.console import Console
from rich.table import Table

from unified.security.curve import Gatekeeper, new_key, secure_client
from unified.security.keys import ClusterKey

Socket = zmq.Socket[bytes]
ECHO, COUNT, END = b"e", b"c", b"x"
SMALL = b"x" * 64
LARGE = bytes(64 << 20)
CONTENDERS = ("without", "with")


class Row(NamedTuple):
    title: str
    unit: str
    measure: Callable[[Client], float]


class Client:
    """The measuring side, connected to a process of its own that answers."""

    def __init__(self, key: ClusterKey | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        pair = None if key is None else (key.public, key.secret)
        self._process = spawn.Process(target=serve, args=(theirs, pair), daemon=True)
        self._process.start()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, key, name="client")
        self.pull = self._context.socket(zmq.PULL)
        self._gatekeeper.guard(self.pull)
        self.pull.bind("tcp://127.0.0.1:*")
        ours.send(self.pull.get_string(zmq.LAST_ENDPOINT))
        address = ours.recv()
        self.push = self._context.socket(zmq.PUSH)
        secure_client(self.push, key)
        began = time.perf_counter()
        self.push.connect(address)
        self.call(ECHO, SMALL)
        self.connect_ms = (time.perf_counter() - began) * 1e3

    def call(self, *frames: bytes) -> None:
        self.push.send_multipart(frames, copy=False)
        self.pull.recv_multipart(copy=False)

    def close(self) -> None:
        self.push.send(END)
        self._process.join(10)
        self._gatekeeper.close()
        self._context.destroy(0)


def serve(pipe: multiprocessing.connection.Connection, pair: tuple[str, str] | None) -> None:
    """The answering side: an echo gets its payload back, of messages that count only the last has an answer."""
    key = None if pair is None else ClusterKey(*pair)
    context: zmq.Context[Socket] = zmq.Context()
    gatekeeper = Gatekeeper(context, key, name="server")
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    gatekeeper.guard(pull)
    pull.bind("tcp://127.0.0.1:*")
    secure_client(push, key)
    push.connect(pipe.recv())
    pipe.send(pull.get_string(zmq.LAST_ENDPOINT))
    while True:
        first, *rest = pull.recv_multipart(copy=False)
        if first.bytes == ECHO:
            push.send_multipart(rest, copy=False)
        elif first.bytes == END:
            break
        elif rest:
            push.send(b"")
    gatekeeper.close()
    context.destroy(0)


def round_trip_us(client: Client) -> float:
    """Median of 2 000, each waited for."""
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        client.call(ECHO, SMALL)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def messages_per_s(client: Client) -> float:
    """50 000 of 64 bytes, one way, as fast as they go."""
    count = 50_000
    began = time.perf_counter()
    for _ in range(count - 1):
        client.push.send(COUNT)
    client.call(COUNT, SMALL)
    return count / (time.perf_counter() - began)


def large_gib_s(client: Client) -> float:
    """64 MiB one way, five times, each acknowledged."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        client.call(COUNT, LARGE)
        times.append(time.perf_counter() - began)
    return len(LARGE) / 2**30 / statistics.median(times)


ROWS = [
    Row("connect, until the first answer", "ms", lambda client: client.connect_ms),
    Row("round trip of 64 B, median", "µs", round_trip_us),
    Row("small messages one way", "1000/s", lambda client: messages_per_s(client) / 1000),
    Row("64 MiB one way", "GiB/s", large_gib_s),
]


def measure(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Readings by row and contender. The first of the two changes with each round."""
    found: dict[str, dict[str, list[float]]] = {row.title: {name: [] for name in CONTENDERS} for row in ROWS}
    for index in range(num_rounds):
        for name in CONTENDERS if index % 2 == 0 else reversed(CONTENDERS):
            client = Client(new_key() if name == "with" else None)
            try:
                for row in ROWS:
                    found[row.title][name].append(row.measure(client))
            finally:
                client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/bench/curve.json"))
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    table = Table("", "unit", "without a key", "with a key", "with ÷ without", title="Medians over tcp on loopback")
    for row in ROWS:
        without, secured = (statistics.median(found[row.title][name]) for name in CONTENDERS)
        table.add_row(row.title, row.unit, f"{without:.3g}", f"{secured:.3g}", f"{secured / without:.2f}")
    Console().print(table)
    where = f"{os.cpu_count()} cores, Python {platform.python_version()}, libzmq {zmq.zmq_version()}"
    print(f"{arguments.rounds} interleaved rounds; {where}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"where": where, "readings": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
