"""A queue's owner in a process of its own, which can be stopped: run as a script, it owns one, to the end of stdin."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.support.bus import HOST_ID, Process
from unified.bus.calls.registry import MethodRegistry, rpc
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.queue.server import METHODS, QueueService, method


class OwnerProcess(Process):
    """Worker `worker`, which owns queue `q` of so many items."""

    def __init__(self, worker: str, run_dir: Path, route: str, relay: str, size: int) -> None:
        super().__init__(worker, str(run_dir), route, relay, str(size), program=("-m", __name__))

    def stop(self) -> None:
        self.kill(signal.SIGSTOP)
        os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.kill(signal.SIGCONT)


Own = Callable[..., OwnerProcess]


@rpc(inline=True)
def nothing() -> None:
    """A bare call, to compare with."""


def main() -> None:
    worker, run_dir, route, relay, size = sys.argv[1:]
    service = QueueService("q", size=int(size))
    endpoint = BusEndpoint(
        BusIdentity(job="job-1", worker=worker, incarnation=0, node="n1", host=HOST_ID),
        BusNetwork(run_dir=run_dir, address="127.0.0.1", relay=relay, route=route),
        registry=MethodRegistry({method("q", verb): getattr(service, verb) for verb in METHODS}, nothing=nothing),
    )
    inbox = endpoint.start()
    endpoint.open()
    print(msgspec.json.encode(inbox).decode(), flush=True)
    sys.stdin.read()
    endpoint.close()
    service.shut_down()


if __name__ == "__main__":
    main()
