"""Waits of the runtime are left when a round breaks: the healthy rank keeps its process (see docs/elastic.md)."""

from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from unified.api.builder import DLJobBuilder

pytestmark = pytest.mark.processes

PROGRAM = """
    import asyncio, os, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from unified import RoleGroup, WeightsReceiver, current_worker, rpc
    from unified.api.runtime import DataLoaderIter, DataQueue
    from unified.data import TrainingOrchestrator
    from unified.elastic import ElasticState, elastic

    FOLDER = Path({folder!r})

    class Peer:
        def __init__(self):
            self.queues = [DataQueue(name, size=1, is_master=True) for name in ("empty", "full")]
            self.queues[1].put(0)

        @rpc
        def never(self):
            while not current_worker().should_stop:
                time.sleep(0.01)

        @rpc
        def numbers(self):
            yield 1
            self.never()
            yield 2

        def run(self):
            self.never()

    class Slow:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            while not (FOLDER / "end").exists():
                time.sleep(0.01)
            return index

    def call(method):
        return RoleGroup("peer").call_rank0(method)

    async def answer():
        return await call("never")

    async def barrier():
        async with TrainingOrchestrator() as orchestrator:
            await orchestrator.register_worker()
            await orchestrator.wait_barrier("b", timeout=1000)

    WAITS = {{
        "DataQueue.get": lambda: DataQueue("empty").get(1),
        "DataQueue.put": lambda: DataQueue("full").put(1),
        "DataQueue of nobody": lambda: DataQueue("nobody", owner_timeout=1000).get(1),
        "call.result": lambda: call("never").result(),
        "group.result": lambda: RoleGroup("peer").call("never").result(),
        "stream": lambda: list(RoleGroup("peer").stream("numbers")[0]),
        "await": lambda: asyncio.run(answer()),
        "barrier": lambda: asyncio.run(barrier()),
        "DataLoaderIter": lambda: next(iter(DataLoaderIter(DataLoader(Slow(), batch_size=1), num_workers=1))),
        "sync_weights": lambda: RoleGroup("peer").sync_weights(torch.nn.Linear(2, 2), timeout=1000),
        "WeightsReceiver.wait": lambda: WeightsReceiver("other").wait(),
    }}

    def run():
        state = ElasticState(model=torch.nn.Linear(2, 2))
        tried = []

        @elastic(state)
        def train():
            while state.step < len(WAITS):
                name = list(WAITS)[state.step]
                begun, killed = FOLDER / f"begun {{name}}", FOLDER / f"killed {{name}}"
                if dist.get_rank() == 0 and name not in tried:
                    tried.append(name)
                    begun.touch()
                    try:
                        WAITS[name]()
                    except Exception as error:  # a loop that catches its own errors does not catch the end of a round
                        (FOLDER / "errors").open("a").write(f"{{name}}: {{error!r}}\\n")
                elif dist.get_rank() == 1 and not killed.exists():
                    while not begun.exists():
                        time.sleep(0.01)
                    time.sleep(0.2)
                    killed.touch()
                    os.kill(os.getpid(), 9)
                state.commit()
                current_worker().report(step=state.step)

        train()
        (FOLDER / "end").touch()
        if tried:
            (FOLDER / "left").write_text("\\n".join([str(current_worker().incarnation), *tried]))
"""


def test_a_rank_that_waits_for_others_leaves_the_wait_when_its_peer_dies(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(waits=PROGRAM.format(folder=str(tmp_path)))
    builder = DLJobBuilder().device_type("CPU").node_num(1).device_per_node(4)
    builder.train("waits.run").nnodes(1).nproc_per_node(2).max_restart(100).per_node_max_failure(100).end()
    builder.workload("peer", "waits.Peer").total(1).not_driver().end()
    handle = local_cluster(nodes=1, devices=4).submit(builder.build(), "waits", restart_backoff=0.0)
    assert handle.wait(timeout=100) == 0, "\n".join(handle.logs())
    assert lines(tmp_path, "errors") == []
    incarnation, *tried = lines(tmp_path, "left")
    assert incarnation == "0", "the healthy rank was started again"
    assert len(tried) == 11
