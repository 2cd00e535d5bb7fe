"""Queues in real jobs whose workers are killed: consumers, a producer in the middle of a put, the owner."""

import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from tests.cluster.test_failure_table import documented
from unified.api.builder import DLJob, DLJobBuilder
from unified.cli.main import main
from unified.protocol.client_master import Explain, Story
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

WAIT_S = 100

# Document 3, "DataQueue", import prefix changed.
OWNER_OF_THE_REFERENCE = """
# owner (usually rank 0 producer)
queue_master = DataQueue[str]("test_queue", size=10, is_master=True)
queue_master.put("data1", "data2")
"""
CLIENT_OF_THE_REFERENCE = """
# client (producer or consumer)
queue_client = DataQueue[str]("test_queue")
queue_client.get(1)
"""

COMMON = '''
import os
import time
from pathlib import Path

import numpy as np

from unified.api.runtime import DataQueue, current_worker
from unified.errors import QueueClosedError

folder = Path({folder!r})

def note(name, *words):
    """A line in a file, whole or not at all."""
    with open(folder / name, "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

def pause():
    while not current_worker().should_stop:
        time.sleep(0.01)
'''


@pytest.fixture
def write(project: Project, tmp_path: Path) -> Callable[[str], None]:
    return lambda code: project(queue_job=COMMON.format(folder=str(tmp_path)) + textwrap.dedent(code))


def job(**roles: int) -> DLJob:
    """A role for each function of the module, with so many workers."""
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    for role, total in roles.items():
        builder = builder.workload(role, f"queue_job.{role}").total(total).resource(cpu=0.01).restart_alone()
    built: DLJob = builder.build()
    return built


def kill(cluster: LocalCluster, handle: Any, role: str, rank: int = 0) -> None:
    pids = {name: pid for name, pid in cluster.workers(handle).items() if name.startswith(f"{role}_")}
    name = next(name for name in pids if name.split("_")[1].endswith(f"-{rank}"))
    os.kill(pids[name], signal.SIGKILL)


def test_queue_of_the_reference(local_cluster: Cluster, write: Callable[[str], None]) -> None:
    indent = " " * 4
    owner = textwrap.indent(OWNER_OF_THE_REFERENCE, indent)
    client = textwrap.indent(
        CLIENT_OF_THE_REFERENCE.replace("queue_client.get(1)", "print(queue_client.get(1))"), indent
    )
    write(f"def owner():\n{owner}\ndef client():\n{client}")
    handle = local_cluster(nodes=1, devices=1).submit(job(client=1, owner=1), "reference")
    assert handle.wait(timeout=WAIT_S) == 0
    assert [line for line in handle.logs(role="client") if "data1" in line]


def test_items_of_a_killed_consumer_are_done_by_another(
    local_cluster: Cluster, write: Callable[[str], None], tmp_path: Path
) -> None:
    write(
        """
        def owner():
            with DataQueue("q", is_master=True) as queue:
                queue.put(*range(20), np.arange(100_000))
                while not (folder / "killed").exists():
                    time.sleep(0.01)

        def victim():
            if current_worker().incarnation > 0:
                return
            queue = DataQueue("q")
            queue.get(5)
            queue.get(5)
            note("taken", "10")
            pause()

        def consumer():
            queue = DataQueue("q")
            while not (folder / "taken").exists():
                time.sleep(0.01)
            for item in queue:
                note("done", item if isinstance(item, int) else int(item.sum()))
        """
    )
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(job(owner=1, victim=1, consumer=2), "consumers")
    eventually(lambda: lines(tmp_path, "taken"), timeout=WAIT_S)
    kill(cluster, handle, "victim")
    (tmp_path / "killed").touch()
    assert handle.wait(timeout=WAIT_S) == 0
    done = sorted(map(int, lines(tmp_path, "done")))
    assert done == [*range(5, 20), sum(range(100_000))]


@pytest.mark.slow
def test_a_producer_is_killed_in_the_middle_of_a_put(
    local_cluster: Cluster, write: Callable[[str], None], tmp_path: Path
) -> None:
    """What was acknowledged is all there, large arrays in its shared memory too; of the rest, the first so many."""
    write(
        """
        def producer():
            if current_worker().incarnation > 0:
                return
            queue = DataQueue("q")
            queue.put(0, np.full(300_000, 1, dtype=np.uint8))
            note("put", "2")
            queue.put(*[np.full(300_000, number, dtype=np.uint8) for number in range(2, 9)])

        def owner():
            queue = DataQueue("q", is_master=True, size=4)
            while not queue.stats().waiting_producers:
                time.sleep(0.01)
            note("full", queue.qsize())
            while queue.stats().waiting_producers:
                time.sleep(0.01)
            note("alone", queue.qsize())
            queue.close()

        def consumer():
            while not (folder / "alone").exists():
                time.sleep(0.01)
            for item in DataQueue("q"):
                note("done", int(np.min(item)), int(np.max(item)))
        """
    )
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(job(owner=1, producer=1, consumer=1), "producer")
    eventually(lambda: lines(tmp_path, "full"), timeout=WAIT_S)
    kill(cluster, handle, "producer")
    assert handle.wait(timeout=WAIT_S) == 0
    assert lines(tmp_path, "alone") == ["4"]
    assert lines(tmp_path, "done") == [f"{number} {number}" for number in range(4)]


@pytest.mark.slow
def test_owner_of_a_durable_queue_is_killed_again_and_again(
    local_cluster: Cluster, write: Callable[[str], None], tmp_path: Path
) -> None:
    write(
        """
        def owner():
            queue = DataQueue("q", is_master=True, size=5, durable=True)
            note("incarnations", current_worker().incarnation)
            while True:
                stats = queue.stats()
                if stats.is_closed and not stats.depth and not stats.leased:
                    return
                time.sleep(0.01)

        def producer():
            queue = DataQueue("q")
            rank = current_worker().actor_info.rank
            futures = []
            for number in range(150):
                if number % 10:
                    futures.append(queue.put_async((rank, number, b"x" * number * 50)))
                else:
                    queue.put((rank, number, b""))
            for future in futures:
                future.result()
            note("finished", rank)

        def consumer():
            for rank, number, _ in DataQueue("q"):
                note("done", rank, number)
                time.sleep(0.002)

        def closer():
            while not (folder / "finished").exists() or len((folder / "finished").read_text().splitlines()) < 2:
                time.sleep(0.01)
            DataQueue("q").close()
        """
    )
    cluster = local_cluster(nodes=1, devices=1)
    roles = {"owner": 1, "producer": 2, "consumer": 2, "closer": 1}
    handle = cluster.submit(job(**roles), "owner")
    for incarnation in range(3):
        eventually(lambda incarnation=incarnation: str(incarnation) in lines(tmp_path, "incarnations"), timeout=WAIT_S)  # type: ignore[misc]
        num_done = len(lines(tmp_path, "done"))
        eventually(lambda num=num_done: len(lines(tmp_path, "done")) > num + 20, timeout=WAIT_S)  # type: ignore[misc]
        kill(cluster, handle, "owner")
    assert handle.wait(timeout=WAIT_S) == 0
    done = [tuple(map(int, line.split())) for line in lines(tmp_path, "done")]
    assert sorted(done) == [(rank, number) for rank in range(2) for number in range(150)]


def test_a_durable_queue_whose_journal_stayed_on_a_lost_node_does_not_go_on_empty(
    local_cluster: Cluster, write: Callable[[str], None], tmp_path: Path
) -> None:
    write(
        """
        def owner():
            how = "anew" if (folder / "anew").exists() else True
            try:
                queue = DataQueue("q", is_master=True, durable=how)
            except Exception as error:
                note("refused", type(error).__name__, error)
                raise
            note("found", queue.qsize())
            if current_worker().incarnation == 0:
                queue.put(1, 2, 3)
                note("full", 3)
            pause()
        """
    )
    cluster = local_cluster(nodes=2, devices=1)
    builder: Any = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU")
    role = builder.workload("owner", "queue_job.owner").total(1).resource(accelerator=1).restart_alone()
    handle = cluster.submit(role.max_restart(50).per_node_max_failure(50).build(), "owner")
    eventually(lambda: lines(tmp_path, "full"), timeout=WAIT_S)
    (worker,) = handle.status().workers
    cluster.kill_agent([node.node for node in cluster.nodes].index(worker.node or ""))
    eventually(
        lambda: len(lines(tmp_path, "refused")) >= 2, timeout=WAIT_S, message="its later incarnations do not raise"
    )
    for line in lines(tmp_path, "refused"):
        assert line.startswith("QueueJournalError the journal of the durable queue 'q' was ")
        assert f"/q.sqlite on node {worker.node}, and this worker" in line
    (tmp_path / "anew").touch()
    eventually(lambda: lines(tmp_path, "found") == ["0", "0"], timeout=WAIT_S, message="it does not begin anew")
    assert {use.limit for use in handle.status().budgets} == documented()["queue-journal-lost"]


def test_a_queue_that_its_consumer_closes_is_the_end_of_its_producers(
    local_cluster: Cluster, write: Callable[[str], None]
) -> None:
    write(
        """
        def consumer():
            queue = DataQueue("q", is_master=True, size=4)
            for _ in range(20):
                queue.get()
            queue.close()

        def producer():
            queue = DataQueue("q")
            while True:
                queue.put("item")

        def hasty():
            queue = DataQueue("q")
            while True:
                queue.put_async("item")
                queue.put_async("item").result()

        def careful():
            queue = DataQueue("q")
            try:
                while True:
                    queue.put("item")
            except QueueClosedError as end:
                note("careful", end.num_put)
                raise RuntimeError("careful about an early end") from end
        """
    )
    cluster = local_cluster(nodes=1, devices=1)
    with cluster.submit(job(consumer=1, producer=2, hasty=1)) as handle:
        assert handle.wait(WAIT_S) == 0
        printed = list(handle.logs())
        assert not any("Traceback" in line for line in printed)
        for name in ("producer-0", "producer-1", "hasty-0"):
            (line,) = [line for line in printed if line.startswith(f"[{name}]")]
            assert "unified: ended by the end of a stream: queue 'q' is closed: 0 of 1 items went in before." in line
        assert [(worker.incarnation, worker.num_unread_errors) for worker in handle.status().workers] == [(0, 0)] * 4
    with cluster.submit(job(consumer=1, careful=1), failover_exec_strategy=0) as handle:
        assert handle.wait(WAIT_S) == 1, "code that catches it decides for itself"


def test_queues_that_wait_for_one_another_are_named_while_they_do(
    local_cluster: Cluster, write: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`a` fills `x` before it fills `y` again, and `b` empties `x` only after an item of `y`."""
    write(
        """
        from unified.queue import consumer, producer
        from unified.worker import progress

        consumer.SLICE_S = producer.SLICE_S = 2.0
        progress.QUEUES_S = 0.5

        def a():
            x, y = DataQueue("x", is_master=True, size=1), DataQueue("y", is_master=True)
            y.put(0)
            x.put(0)
            x.put(1, 2)
            y.put(1)

        def b():
            x, y = DataQueue("x"), DataQueue("y")
            for queue in (y, x, y, x, x, y):
                queue.get()

        def helper():
            while not (folder / "help").exists():
                time.sleep(0.01)
            DataQueue("y").put("help")
        """
    )
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(job(a=1, b=1, helper=1), "cycle")
    cycle = (
        "queues wait for one another: worker a_1-0_1-0 (thread MainThread) puts to full queue 'x' -> "
        "worker b_1-0_1-0 (thread MainThread) gets from empty queue 'y' -> the first"
    )
    eventually(lambda: handle.status().reason == cycle, WAIT_S, handle.status().reason)
    main(["status", "cycle", "--master", cluster.address])
    assert cycle in capsys.readouterr().out
    (tmp_path / "help").touch()
    assert handle.wait(timeout=WAIT_S) == 0
    events = handle.connection.ask(Explain(job="cycle"), Story).events
    told = [(each.event, each.reason) for each in events if each.event.startswith("queue-cycle")]
    assert told[0] == ("queue-cycle", cycle)
    assert "event=queue-cycle " in (cluster.home / "master.log").read_text()
