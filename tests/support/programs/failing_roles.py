"""Roles that fail as their environment says: ``HOW`` in the first ``TIMES`` incarnations of rank 0; the others go on.

On the node that is named by ``HANGS_ON`` their import hangs, and that of ``FAULTY_LINK`` fails its node check. In the
first ``DIES_IN_IMPORT`` incarnations it ends the process. With ``STEP`` it reports that step before it fails.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from unified import current_worker, rpc

LIMIT_S = 60.0
if (num_incarnations := int(os.environ.get("DIES_IN_IMPORT", "0"))) and current_worker().incarnation < num_incarnations:
    os._exit(3)
node = os.environ.get("UNIFIED_NODE", "")
if node == os.environ.get("HANGS_ON"):
    time.sleep(LIMIT_S)
if node == os.environ.get("FAULTY_LINK"):
    from unified.rounds import node_check

    def broken(*_: object) -> float:
        raise RuntimeError("no carrier")

    node_check.LINK_WITHIN_S = 3.0
    node_check.measure_link = broken  # type: ignore[assignment]


def is_released() -> bool:
    return Path(os.environ["FOLDER"], "end").exists()


def wait() -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_released() and time.monotonic() < deadline:
        time.sleep(0.02)


def fail(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("loss is NaN")
        case "exit":
            print("no license found", file=sys.stderr, flush=True)
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LIMIT_S)
        case "fault":
            ctypes.string_at(0)
        case "memory":
            Path(os.environ["GROUP"], "cgroup.procs").write_text(str(os.getpid()))
            held = [bytearray(os.urandom(1) * 2**20) for _ in range(2048)]
            print(len(held))


def work() -> None:
    """Fail, or wait to be released."""
    worker = current_worker()
    if worker.actor_info.rank == 0 and worker.incarnation < int(os.environ.get("TIMES", "1")):
        if (delay_s := float(os.environ.get("AFTER_S", "0"))) > 0:
            time.sleep(delay_s)
        if "STEP" in os.environ:
            worker.report(step=int(os.environ["STEP"]))
        fail(os.environ.get("HOW", ""))
    wait()


def stall() -> None:
    """Report nothing in the first incarnation."""
    worker, step = current_worker(), 0
    while not is_released():
        step += 1
        if worker.incarnation > 0:
            worker.report(step=step)
        time.sleep(0.05)


def train() -> None:
    """Fail in the midst of collectives: the others break, too."""
    import torch
    import torch.distributed as dist

    worker = current_worker()
    if worker.actor_info.rank == 0 and worker.incarnation < int(os.environ.get("TIMES", "1")):
        threading.Timer(0.3, lambda: fail(os.environ["HOW"])).start()
    while not torch.equal(together := _sum(float(is_released())), torch.full_like(together, dist.get_world_size())):
        time.sleep(0.01)


def loop() -> None:
    """Survive the other ranks until all are released."""
    import torch

    from unified.elastic import ElasticState, elastic

    state = ElasticState(model=torch.nn.Linear(1, 1))

    @elastic(state)
    def turn() -> None:
        import torch.distributed as dist

        Path(os.environ["FOLDER"], f"began-{dist.get_rank()}").touch()
        while _sum(float(is_released())) < dist.get_world_size():
            state.commit()
            time.sleep(0.01)

    turn()


def _sum(value: float):  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist

    tensor = torch.full((1,), value)
    dist.all_reduce(tensor)
    return tensor


class Service:
    @rpc
    def divide(self, dividend: float, divisor: float) -> float:
        return dividend / divisor

    @rpc
    def hold(self) -> None:
        wait()
