"""A mirror that is told what changes is what the master would answer in whole, whatever happens."""

from collections.abc import Iterator

import msgspec
import pytest

from tests.support.sim.chaos import Chaos
from unified.client.mirror import ClusterMirror
from unified.protocol.client_master import Changes, JobStatus, NodeStatus, master_to_client
from unified_master.core.clients import status, watching
from unified_master.core.state import Cluster
from unified_master.core.step import MasterStep


class Watcher:
    """A mirror of the cluster or of one job, whose requests are answered without a network."""

    def __init__(self, job_id: str = "") -> None:
        self.job_id = job_id
        self.mirror = ClusterMirror()
        self.num_whole = 0

    def catch_up(self, now: float, cluster: Cluster) -> None:
        is_last = False
        while not is_last:
            answer = watching.changes_since(MasterStep(now, cluster), self.job_id, self.mirror.version)
            _, changes = master_to_client.decode(master_to_client.encode(answer, 1))
            assert isinstance(changes, Changes)
            self.num_whole += changes.is_whole
            self.mirror.apply(changes)
            is_last = changes.is_last

    def check(self, now: float, cluster: Cluster) -> None:
        """Compare the mirror with the whole."""
        jobs = [job for job in cluster.jobs.values() if self.job_id in ("", job.job_id)]
        for job in jobs:
            known = self.mirror.status(job.job_id)
            assert known is not None
            whole = same(status.job_status(cluster, job))
            found = list(different(same(known), whole))
            assert not found, f"{job.job_id}: {found}"
        assert set(self.mirror.jobs) == {job.job_id for job in jobs}
        if not self.job_id:
            nodes = {name: still(status.node_status(now, node)) for name, node in cluster.nodes.items()}
            assert {name: still(node) for name, node in self.mirror.nodes.items()} == nodes


def same(job: JobStatus) -> JobStatus:
    """Return the status without what is not told when it alone changes."""
    workers = [
        msgspec.structs.replace(
            worker, progress=worker.progress and msgspec.structs.replace(worker.progress, num_activities=0)
        )
        for worker in job.workers
    ]
    return msgspec.structs.replace(job, workers=workers)


def different(known: JobStatus, whole: JobStatus) -> Iterator[str]:
    """Yield the fields that differ."""
    pairs: list[tuple[str, msgspec.Struct, msgspec.Struct]] = [
        ("job", msgspec.structs.replace(known, workers=[]), msgspec.structs.replace(whole, workers=[]))
    ]
    pairs += [(old.name, old, new) for old, new in zip(known.workers, whole.workers, strict=True)]
    for name, old, new in pairs:
        for field in old.__struct_fields__:
            if getattr(old, field) != getattr(new, field):
                yield f"{name}.{field}: {getattr(old, field)!r}, not {getattr(new, field)!r}"


def still(node: NodeStatus) -> NodeStatus:
    return msgspec.structs.replace(node, seen_s_ago=0.0)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_a_mirror_that_hears_of_changes_is_what_the_whole_answer_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # answers that hold a part of what has changed
        monkeypatch.setattr(watching, "MAX_PARTS", 3)
        monkeypatch.setattr(watching, "FEW_PARTS", 3)
    chaos = Chaos(seed, has_all_faults=True)
    watchers = {"": Watcher()}
    for _ in range(100):
        chaos.run(1)
        cluster, now = chaos.world.core.cluster, chaos.world.now
        for job_id in cluster.jobs:
            watchers.setdefault(job_id, Watcher(job_id))
        for job_id, watcher in list(watchers.items()):
            if job_id and job_id not in cluster.jobs:
                del watchers[job_id]
            elif chaos.rng.random() < 0.7:
                watcher.catch_up(now, cluster)
                watcher.check(now, cluster)
    events = [event.sequence for event in watchers[""].mirror.events]
    assert len(set(events)) == len(events) > 10
