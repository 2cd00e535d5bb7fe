"""A worker for the bus tests: prints its inbox, answers calls, ends when its stdin does."""

import os
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork


def echo(value: object) -> object:
    return value


def total(array: np.ndarray) -> int:
    return int(array.sum(dtype=np.int64))


def nbytes(array: np.ndarray) -> int:
    return array.nbytes


def make(size: int) -> np.ndarray:
    return np.ones(size, np.uint8)


def forever() -> None:
    threading.Event().wait()


def count_for_ever(number: int) -> Iterator[int]:
    yield from range(number)
    forever()


def fork() -> int:
    """The id of a child that only waits to be killed."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def main() -> None:
    worker, incarnation, run_dir, route, relay, host_id, *rest = sys.argv[1:]
    endpoint = BusEndpoint(
        BusIdentity(job="job-1", worker=worker, incarnation=int(incarnation), node="n1", host=host_id),
        BusNetwork(run_dir=run_dir, address=rest[0] if rest else "127.0.0.1", relay=relay, route=route),
        registry=MethodRegistry(
            echo=echo,
            total=total,
            forever=forever,
            pid=os.getpid,
            nbytes=nbytes,
            make=make,
            count_for_ever=count_for_ever,
            fork=fork,
        ),
    )
    inbox = endpoint.start()
    endpoint.open()
    print(msgspec.json.encode(inbox).decode(), flush=True)
    sys.stdin.read()
    endpoint.close()


if __name__ == "__main__":
    main()
