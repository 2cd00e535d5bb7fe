"""A real master for `coordinator.py`, with the workers and the dataset that its load asks for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.coordinator import load
from unified.coordinator.client import RemoteCoordinator
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    DatasetRegistration,
    DataShards,
    FileRun,
    GetDataShard,
    Heartbeat,
    HeartbeatResponse,
    RegisterDataset,
    RegisterWorker,
    SetDataWorker,
    WaitBarrier,
    WorkerRegistration,
    coordinator_to_worker,
)

WORKERS = 100
SHARDS = 1_000
"""So a look-up is answered with ten."""
SHARD_SIZE = 10_000
DATASET = "corpus"


@contextmanager
def master(folder: Path) -> Iterator[str]:
    """A process of its own, its store on disk in this folder. Yields its address."""
    address, log = folder / "address", folder / "master.log"
    command = [sys.executable, "-P", "-m", "unified_master", "--bind", "tcp://127.0.0.1:0", "--die-with-parent"]
    command += ["--state-dir", str(folder / "state"), "--address-file", str(address)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + load.DEADLINE_S
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the master did not start: {log.read_text()[-1000:]}")
            time.sleep(0.01)
        yield address.read_text().strip()
    finally:
        process.terminate()
        process.wait(load.DEADLINE_S)


class Populace:
    """`WORKERS` workers that are registered, and read a dataset of `SHARDS` shards together.

    Attributes:
        heartbeats: what each worker says, and is answered.
        look_ups: the same for the shards that are its own.
        arrivals: what each says at a barrier, but for the barrier's name.
    """

    def __init__(self, address: str) -> None:
        sessions = {f"worker-{rank:03d}": f"{rank:032x}" for rank in range(WORKERS)}
        with RemoteCoordinator(address) as coordinator:
            for rank, (name, session) in enumerate(sessions.items()):
                coordinator.ask(
                    RegisterWorker(worker_id=name, session=session, rank=rank, world_size=WORKERS, timeout_s=600),
                    WorkerRegistration,
                )
            coordinator.ask(_dataset(), DatasetRegistration)
            for name in sessions:
                coordinator.ask(SetDataWorker(dataset_id=DATASET, worker_id=name), Done)
            self.heartbeats = []
            for name, session in sessions.items():
                heartbeat = Heartbeat(worker_id=name, session=session)
                known = coordinator.ask(heartbeat, HeartbeatResponse)
                self.heartbeats.append(load.Said(_body(heartbeat), _body(known)))
                if not known.is_known:
                    raise load.WrongAnswerError(f"{name} is not known to the master")
            self.look_ups = []
            found: list[int] = []
            for name in sessions:
                look_up = GetDataShard(dataset_id=DATASET, worker_id=name, epoch=0)
                shards = coordinator.ask(look_up, DataShards)
                self.look_ups.append(load.Said(_body(look_up), _body(shards)))
                found += [shard.shard_id for shard in shards.shards]
            if sorted(found) != list(range(SHARDS)):
                raise load.WrongAnswerError(f"{len(found)} shards were given out, {len(set(found))} different ones")
        self.arrivals = [
            WaitBarrier(barrier_id="", worker_id=name, session=session, arrival=0, world_size=WORKERS)
            for name, session in sessions.items()
        ]


def _dataset() -> RegisterDataset:
    paths = (f"/data/corpus/part-{shard:05d}.parquet" for shard in range(SHARDS))
    return RegisterDataset(
        dataset_id=DATASET,
        path="/data/corpus",
        format="parquet",
        total_samples=SHARDS * SHARD_SIZE,
        shard_size=SHARD_SIZE,
        files=[FileRun(path=path, num_samples=SHARD_SIZE) for path in paths],
    )


def _body(message: object) -> bytes:
    """As it travels, without its header."""
    return coordinator_to_worker.encode_body(message)
