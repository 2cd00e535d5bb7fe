"""Real ranks of an elastic role, and the store of their rounds."""

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.deadlines import met, missed
from tests.support.workers import Agent, Child, ForkedChild, Forker, attribute
from unified.job.spec import Communication, EntryPoint
from unified.protocol.agent_master import RunOrder
from unified.protocol.worker_agent import Finished, Hello

pytestmark = pytest.mark.processes

GLOO_S = met(100.0)
"""Time-out of a collective. Gloo rarely loses an operation when a peer closes its connection: see docs/elastic.md."""
ELASTIC = f"""
    import os
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from unified.api.runtime.worker import current_worker

    def check():
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert (rank, world) == (dist.get_rank(), dist.get_world_size())
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        print("sum", value.item(), "round", current_worker().round, flush=True)
        if current_worker().round == 1:
            while True:  # until a peer dies
                dist.all_reduce(value)

    def run():
        check()

    if __name__ == "__main__":
        dist.init_process_group("gloo", timeout=timedelta(seconds={GLOO_S}))
        check()
        dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("entry", "auto_setup"),
    [
        (attribute("run"), True),
        pytest.param(EntryPoint(kind="script", target="wp_code.py"), False, marks=pytest.mark.slow),
        (EntryPoint(kind="script", target="wp_code.py"), True),
    ],
    ids=["automatic", "env", "replaced"],
)
def test_rank_that_dies_is_replaced_in_a_new_round(
    agent: Agent, forker: Forker, entry: EntryPoint, auto_setup: bool
) -> None:
    agent.write("wp_code.py", ELASTIC)
    store = forker.launch_store()
    communication = Communication(auto_setup=auto_setup, timeout_s=GLOO_S)
    role: dict[str, Any] = {"kind": "elastic", "total": 2, "per_group": 2, "communication": communication}

    port = store.expect(Hello).store_port or 0

    def begin(round_: int) -> list[ForkedChild]:
        ranks = [forker.launch(entry, rank=rank, incarnation=round_ - 1, **role) for rank in range(2)]
        for rank, child in enumerate(ranks):
            order = RunOrder(
                round=round_,
                rank=rank,
                world_size=2,
                store_host="127.0.0.1",
                store_port=port,
                store_prefix=f"job-1/role/{round_}",
            )
            pids[child.name] = child.run(order).pid
        return ranks

    pids: dict[str, int] = {}
    first = begin(1)
    for child in first:
        child.until_printed("sum 3.0 round 1")
    os.kill(pids[first[1].name], signal.SIGKILL)
    failure = first[0].failure()
    assert failure.is_collateral, failure
    assert failure.category == "user"
    first[0].until_gone()

    for child in begin(2):
        child.expect(Finished)
        assert child.output.read_text() == "sum 3.0 round 2\n"
        child.ends()
        assert "Warning" not in child.errors.read_text()
    store.ends()


@pytest.fixture
def outside_of_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may have imported `unified.elastic`, whose variable a zygote would inherit."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)


@pytest.mark.parametrize(
    ("line", "is_elastic"),
    [("from unified.elastic import elastic", True), ("import os  # or unified.elastic", False)],
)
def test_nccl_s_watchdog_knows_a_rank_that_imports_elastic_later_and_no_other(
    agent: Agent, outside_of_elastic: None, forker: Forker, line: str, is_elastic: bool
) -> None:
    """The group is made before the script runs, and NCCL reads the variable then."""
    show = "print('handling', os.environ.get('TORCH_NCCL_ASYNC_ERROR_HANDLING'), dist.is_initialized(), flush=True)"
    agent.write("late.py", f"import os\nimport torch.distributed as dist\n\n{show}\n\ndef later():\n    {line}\n")
    store = forker.launch_store()
    port = store.expect(Hello).store_port or 0
    script = EntryPoint(kind="script", target="late.py")
    child = forker.launch(script, kind="elastic", communication=Communication(timeout_s=GLOO_S))
    child.run(RunOrder(round=1, rank=0, world_size=1, store_host="127.0.0.1", store_port=port, store_prefix="p"))
    child.expect(Finished)
    assert child.output.read_text() == f"handling {'0' if is_elastic else None} True\n"
    child.ends()
    store.ends()


def test_round_without_a_store_says_whom_it_awaited(agent: Agent) -> None:
    child = agent.load(ELASTIC, kind="elastic", communication=Communication(timeout_s=missed(0.2)))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        child.run(RunOrder(round=1, rank=0, world_size=1, store_host="127.0.0.1", store_port=port, store_prefix="p"))
        failure = child.failure()
    assert failure.category == "crash"
    assert re.search(rf"rank 0 waited \d+\.\d s for the job's store at 127\.0\.0\.1:{port}", failure.summary)


def test_ranks_and_their_store_say_what_to_install_where_torch_is_missing(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever ends first is the one that the user reads of."""
    (tmp_path / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rank = agent.load("def run(): ...", kind="elastic")
    launch = msgspec.structs.replace(agent.describe(attribute("run"), kind="elastic"), kind="store", name="store")
    store = Child(launch, agent.folder)
    agent.children.append(store)
    for child in (rank, store):
        child.expect(Hello)
        failure = child.failure()
        assert failure.category == "setup"
        assert failure.summary.endswith("has none: pip install 'unified-runtime[torch]' there.")
