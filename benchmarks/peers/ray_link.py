"""The driver of Ray in `benchmarks/link/run.py`, which does what lines of stdin say.

    ray_link.py HOST:PORT MARK

Its actor runs on the other host, which is the one that has the resource `callee`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import ray

START_S = 90.0
DEADLINE_S = 300.0


@ray.remote(num_cpus=0, resources={"callee": 1})
class Callee:
    def __init__(self, mark: str) -> None:
        self.mark, self.array = mark, payload(0, mark)

    def take(self, array: Any) -> int:
        return len(array)

    def give(self, nbytes: int) -> Any:
        if len(self.array) != nbytes:
            self.array = payload(nbytes, self.mark)
        return self.array

    def drop(self) -> None:
        self.array = payload(0, self.mark)


def payload(nbytes: int, mark: str) -> Any:
    return np.frombuffer((os.urandom(4096 - len(mark)) + mark.encode()) * (nbytes >> 12), np.uint8)


def main(address: str, mark: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    deadline = time.monotonic() + START_S
    while "callee" not in ray.cluster_resources():
        if time.monotonic() > deadline:
            sys.exit("the other node does not come")
        time.sleep(0.5)
    callee = Callee.remote(mark)  # type: ignore[attr-defined]  # by ray.remote
    array = payload(1 << 20, mark)
    ray.get(callee.take.remote(array), timeout=START_S)
    say(None)
    for line in sys.stdin:
        order = json.loads(line)
        if order["what"] == "drop":
            array = payload(0, mark)
            ray.get(callee.drop.remote(), timeout=DEADLINE_S)
            say(None)
            continue
        if order["what"] == "take" and len(array) != order["nbytes"]:
            array = payload(order["nbytes"], mark)
        began = time.perf_counter()
        ref = callee.take.remote(array) if order["what"] == "take" else callee.give.remote(order["nbytes"])
        result = ray.get(ref, timeout=DEADLINE_S)
        seconds = time.perf_counter() - began
        del ref, result  # so that the store may use their memory again
        say(seconds)


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
