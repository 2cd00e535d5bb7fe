"""A role that loads data for another, over the bus, on two nodes of a real cluster."""

from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJob, DLJobBuilder

pytestmark = pytest.mark.processes


def job_of(entry: str, *, trainers: int = 1, loaders: int = 2) -> DLJob:
    job: DLJob = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(2)
        .device_type("CPU")
        .role("trainer")
        .run(entry)
        .total(trainers)
        .resource(cpu=0.1)
        .role("data")
        .run("unified.loader.service.serve")
        .total(loaders)
        .resource(cpu=0.1)
        .not_driver()
        .restart_alone()
        .build()
    )
    return job


DATA = """
import os, random, signal, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from unified.api.runtime import DataLoaderIter, RayDataLoaderIter, current_worker, patch_dataloader_ray

class Draws(Dataset):
    def __len__(self): return 40
    def __getitem__(self, key):
        return {"key": key, "id": get_worker_info().id, "draw": torch.rand(()), "image": torch.full((64, 64, 4), key)}

class Who(Dataset):
    def __len__(self): return 40
    def __getitem__(self, key):
        time.sleep(0.01)
        return key, os.getpid(), current_worker().actor_info.role

class Lines(IterableDataset):
    def __iter__(self):
        for number in range(20):
            time.sleep(0.005)
            yield get_worker_info().id, number, os.getpid()

class Bad(Draws):
    def __getitem__(self, key):
        if key == 11: raise KeyError(f"sample {key}")
        return key

def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a[k], b[k]) for a, b in zip(ours, theirs) for k in b)
"""

TRAINER = """
from data import *

def run():
    def loader():
        generator = torch.Generator().manual_seed(1)
        return DataLoader(Draws(), batch_size=4, shuffle=True, num_workers=2, generator=generator)

    wanted = list(loader())
    # Document 3, "RayDataLoaderIter"
    dataloader = loader()
    iterator = RayDataLoaderIter(dataloader, num_actors=2)
    batches = []
    for batch in iterator:
        batches.append(batch)
    assert same(batches, wanted), "bit by bit what torch's own workers give"
    batches[0]["image"] += 1  # a batch is its consumer's own
    with patch_dataloader_ray():
        assert same(list(loader()), wanted)

    who = list(DataLoaderIter(DataLoader(Who(), batch_size=4)))
    assert {role for _, _, roles in who for role in roles} == {"data"}
    assert len({int(pid) for _, pids, _ in who for pid in pids}) == 2, "by default as many streams as workers"

    ours = DataLoaderIter(DataLoader(Bad(), batch_size=4), 4)
    assert [next(ours).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    try:
        next(ours)
        raise AssertionError("nothing was raised")
    except KeyError as error:
        (note,) = error.__notes__
        assert "batch 2, sample 11, of dataset Bad raised KeyError in worker data_2-0" in note, note
    assert next(ours).tolist() == [12, 13, 14, 15]
    ours.close()
"""

KILLER = """
from data import *

def keys(loader, num_killed):
    found, pids = [], []
    with DataLoaderIter(loader, 3) as ours:
        for number, batch in enumerate(ours):
            found.append([item.tolist() for item in batch[:-1]])
            pids.append(int(batch[-1][0]))
            if number in (2, 5)[:num_killed]:
                os.kill(pids[-1], signal.SIGKILL)
    return found, pids

class Pids(Who):
    def __getitem__(self, key): return super().__getitem__(key)[:2]

def run():
    for dataset in (Pids(), Lines()):
        wanted, _ = keys(DataLoader(dataset, batch_size=2), 0)
        found, pids = keys(DataLoader(dataset, batch_size=2), 2)
        assert found == wanted, (found, wanted)
    print("all there", len(found))
"""

SCRIPT = """
import collections, os
import torch
from torch.utils.data import DataLoader, Dataset
from unified.api.runtime import DataLoaderIter, Dataset as Pipeline, current_worker

Batch = collections.namedtuple("Batch", "keys pid")

class Local(Dataset):
    def __init__(self): self.double = lambda key: 2 * key
    def __len__(self): return 10
    def __getitem__(self, key): return self.double(key)

# No `if __name__ == "__main__"`: nothing here is imported by the processes that load.
batches = list(DataLoaderIter(DataLoader(Local(), batch_size=5, collate_fn=lambda keys: Batch(keys, os.getpid()))))
assert [batch.keys for batch in batches] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
assert all(type(batch) is Batch for batch in batches), "of this process's own class"
assert os.getpid() not in [batch.pid for batch in batches]

data = Pipeline(range(200)).shuffle(seed=3).map(lambda x: x * x).filter(lambda x: x % 2).batch(8)
assert list(data.spread(4)) == list(data)
roles = Pipeline(range(4)).map(lambda _: current_worker().actor_info.role).spread()
assert set(roles) == {"data"}
"""


@pytest.mark.slow
@pytest.mark.parametrize("route", ["auto", "tcp", "relay"])
def test_batches_of_a_loader_role(local_cluster: Cluster, project: Project, route: str) -> None:
    project(data=DATA, trainer=TRAINER)
    handle = local_cluster(nodes=2, devices=2, env={"UNIFIED_BUS_ROUTE": route}).submit(
        job_of("trainer.run", trainers=2), "loads"
    )
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())


@pytest.mark.slow
def test_killed_loader_workers_cost_no_batch(local_cluster: Cluster, project: Project) -> None:
    project(data=DATA, killer=KILLER)
    handle = local_cluster(nodes=2, devices=2).submit(job_of("killer.run"), "killed")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    incarnations = {worker.name: worker.incarnation for worker in handle.status().workers}
    assert sum(incarnations.values()) >= 2, incarnations


@pytest.mark.slow
def test_what_a_script_defines_travels_by_value(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(script=SCRIPT)
    handle = local_cluster(nodes=2, devices=2).submit(job_of(f"{tmp_path}/project/script.py"), "script")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
