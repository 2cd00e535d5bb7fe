"""A worker of `benchmarks/link/run.py`, or a listener on its cable.

worker.py work ADDRESS MODE KEY_FILE      MODE: best, or curve; no key without a KEY_FILE
worker.py listen
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path

import msgspec

from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.bus.transport.listeners import Listeners
from unified.protocol.records import DirectoryEntry, Inbox, Reachability
from unified.security.keys import ClusterKey, load_key

MARK = "this-payload-travels-in-the-clear"
CALL_S = 300.0


def work(address: str, mode: str, key_file: str) -> None:
    """Be one of the two workers, and do what lines of stdin say."""
    key: ClusterKey | None = load_key(Path(key_file)) if key_file else None
    results: dict[int, memoryview] = {}

    def give(nbytes: int) -> memoryview:
        if nbytes not in results:
            results.clear()
            results[nbytes] = payload(nbytes)
        return results[nbytes]

    if mode == "curve":
        Listeners._bind_bulk = lambda self, host: []  # type: ignore[method-assign]
    bus = BusEndpoint(
        BusIdentity(job="link", worker=address, incarnation=0, node=address, host=address),
        BusNetwork(run_dir="", address=address, key=key),
        registry=MethodRegistry({"take": len, "give": give}),
    )
    inbox = bus.start()
    bus.open()
    say(msgspec.to_builtins(inbox))
    peer = ""
    for line in sys.stdin:
        order = json.loads(line)
        if "peer" in order:
            theirs = msgspec.convert(order["peer"], Inbox)
            peer = f"peer-{theirs.inbox_id}"
            bus.update_directory(
                [
                    DirectoryEntry(
                        worker=peer, incarnation=0, state=Reachability.ALIVE, inbox=theirs, node="n", reason=""
                    )
                ]
            )
            say(None)
            continue
        if order["what"] == "cpu":
            say(time.process_time())
            continue
        if order["what"] == "drop":
            argument = None
            results.clear()
            say(None)
            continue
        argument = give(order["nbytes"]) if order["what"] == "take" else order["nbytes"]
        began = time.perf_counter()
        bus.call(peer, order["what"], [argument], {}).result(CALL_S)
        say(time.perf_counter() - began)
    bus.close()


def listen() -> None:
    """Be a listener on the cable until stdin ends: say how many large frames there were, and how many had the mark."""
    num_frames = num_marked = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as cable:  # 3: all protocols
        cable.bind(("eth0", 0))
        say(None)
        while sys.stdin not in (ready := select.select([cable, sys.stdin], [], [])[0]):
            frame = cable.recv(1 << 17) if ready else b""
            num_frames += len(frame) > 1000
            num_marked += MARK.encode() in frame
    say([num_frames, num_marked])


def payload(nbytes: int) -> memoryview:
    """Return so many bytes, whose pages are there, with a mark in each 4 KiB."""
    return memoryview(bytearray((os.urandom(4096 - len(MARK)) + MARK.encode()) * (nbytes >> 12)))


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    work(*sys.argv[2:]) if sys.argv[1] == "work" else listen()
