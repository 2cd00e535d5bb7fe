"""Gradient accumulation in an elastic loop: a rank that dies within a window costs no row, and trains none twice."""

from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle

pytestmark = pytest.mark.processes
ROWS = 40
EPOCHS = 2

TRAIN = """
    import os
    from contextlib import nullcontext
    from itertools import islice
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from unified import current_worker
    from unified.elastic import ElasticSampler, ElasticState, elastic
    from unified.testing import eventually

    def break_once(state, out):
        # Ends rank 1 while rank 0 is in the same window, which goes on when it knows that the round is broken.
        mine, other = (out / f"broken-{state.step}-{rank}" for rank in (dist.get_rank(), 1 - dist.get_rank()))
        if mine.exists():
            return
        mine.touch()
        if dist.get_rank() == 1:
            eventually(other.exists, timeout=100, message="rank 0 came to no such window")
            os.kill(os.getpid(), 9)
        eventually(lambda: state._notice() is not None, timeout=100, message="the round is not broken")

    def run():
        config = current_worker().job_info.user_config
        out = Path(config.out)
        torch.set_num_threads(1)
        model = torch.nn.Embedding(config.rows, 1)  # a weight for each row counts how often the row was trained
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        state = ElasticState(model=model, optimizer=optimizer, sampler=ElasticSampler(config.rows, 1, seed=3))

        @elastic(state)
        def train():
            replica = DistributedDataParallel(model)
            while state.sampler.epoch < config.epochs:
                batches = iter(state.sampler)
                while window := list(islice(batches, 3)):
                    for number, batch in enumerate(window, 1):
                        with nullcontext() if number == len(window) else replica.no_sync():
                            (replica(torch.tensor(batch)).sum() * -dist.get_world_size()).backward()
                        if number == 1 and state.step in config.deaths:
                            break_once(state, out)
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit(batches=len(window))
            (out / f"{dist.get_rank()}").write_text("\\n".join(str(each) for each in model.weight.flatten().tolist()))

        train()
"""


def test_a_rank_that_dies_within_a_window_costs_no_row(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(elastic_windows=TRAIN)
    out = tmp_path / "out"
    out.mkdir()
    deaths = [3, 13]  # within a full window, and within the last one of an epoch, which has two batches
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    builder.config({"out": str(out), "rows": ROWS, "epochs": EPOCHS, "deaths": deaths})
    builder.train("elastic_windows.run").nnodes(1).nproc_per_node(2).max_restart(5).per_node_max_failure(10)
    handle: JobHandle = local_cluster(nodes=1, devices=2).submit(builder.build(), "windows")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    assert all((out / f"broken-{step}-1").exists() for step in deaths)
    for rank in range(2):
        assert [float(line) for line in lines(out, str(rank))] == [EPOCHS] * ROWS
