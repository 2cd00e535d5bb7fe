"""Workers of a real job share a dataset and meet at barriers; one is killed between two shards."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from unified.api.builder import DLJobBuilder
from unified.testing import eventually

pytestmark = pytest.mark.processes

WAIT_S = 100

READERS = """
import asyncio
import time
from pathlib import Path

from unified import current_worker
from unified.data import DatasetRegistry, TrainingOrchestrator
from unified.errors import BarrierError

folder = Path({folder!r})

def note(name, *words):
    with open(folder / name, "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

def read():
    registry = DatasetRegistry()
    while shards := registry.get_assignment("d", epoch=0):
        shard = shards[0]
        if registry.mark_done("d", shard.shard_id, 0):
            for sample in range(shard.start_sample, shard.end_sample):
                note("done", sample)

async def work():
    worker = current_worker()
    async with TrainingOrchestrator() as me:
        if worker.incarnation > 0:
            note("back", await me.register_worker())
            read()
            return
        await me.wait_barrier("begin")
        DatasetRegistry().register("d", folder / "data", "jsonl", shard_size=2, shuffle=True)
        await me.wait_barrier("registered")
        if me.rank == 0:
            (shard, *_) = DatasetRegistry().get_assignment("d", epoch=0)
            DatasetRegistry().mark_done("d", shard.shard_id, 0)
            for sample in range(shard.start_sample, shard.end_sample):
                note("done", sample)
            note("holds", me.worker_id)
            while True:
                time.sleep(0.01)
        note("waits", me.worker_id)
        try:
            await me.wait_barrier("with-the-victim")
        except BarrierError as error:
            note("lost", *error.lost)
        read()

def reader():
    asyncio.run(work())
"""


NAMED = """
import asyncio
from pathlib import Path

from unified import current_worker
from unified.data import DatasetRegistry, ShardedDataset, TrainingOrchestrator

folder = Path({folder!r})

async def work(rank):
    async with TrainingOrchestrator(worker_id=f"worker-{{rank}}") as me:
        await me.register_worker()
        registry = DatasetRegistry()
        registry.register("d", folder / "data", "jsonl", shard_size=2)
        await me.wait_barrier("registered")
        if rank == 0:
            (folder / "members").write_text(" ".join(registry.active_workers("d")))
        samples = [sample["x"] for sample in ShardedDataset(registry, "d")]
        with open(folder / "read", "a") as file:
            file.write("".join(f"{{x}}\\n" for x in samples))
        await me.wait_barrier("read")

def reader():
    asyncio.run(work(current_worker().actor_info.rank))
"""


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "part.jsonl").write_text("".join(json.dumps({"x": number}) + "\n" for number in range(60)))


@pytest.mark.slow
def test_workers_that_name_themselves_read_all_of_it(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    """As document 5 does; nobody else is given a part that nobody reads."""
    project(named_job=NAMED.format(folder=str(tmp_path)))
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    built = builder.workload("reader", "named_job.reader").total(2).resource(cpu=0.01).build()
    handle = local_cluster(nodes=1, devices=1).submit(built, "named")
    assert handle.wait(timeout=WAIT_S) == 0
    assert lines(tmp_path, "members") == ["worker-0 worker-1"]
    assert sorted(map(int, lines(tmp_path, "read"))) == list(range(60))


def test_a_killed_reader_holds_nobody_and_loses_no_sample(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(reading_job=READERS.format(folder=str(tmp_path)))
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    built = builder.workload("reader", "reading_job.reader").total(3).resource(cpu=0.01).restart_alone().build()
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(built, "reading")
    (victim,) = eventually(lambda: lines(tmp_path, "holds"), timeout=WAIT_S)
    eventually(lambda: len(lines(tmp_path, "waits")) == 2, timeout=WAIT_S)
    os.kill(cluster.workers(handle)[victim], signal.SIGKILL)
    assert handle.wait(timeout=WAIT_S) == 0
    assert lines(tmp_path, "lost") == [victim, victim]
    assert lines(tmp_path, "back") == [victim]
    assert sorted(map(int, lines(tmp_path, "done"))) == list(range(60))
