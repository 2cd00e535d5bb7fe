"""A world of workers with queues, for each route."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.queue_members import Member, QueueWorld
from tests.support.queue_owner import Own, OwnerProcess
from unified.testing import eventually


@pytest.fixture(params=["auto", "tcp", "relay"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, relay: str) -> Iterator[QueueWorld]:
    run_dir: Path = tmp_path_factory.mktemp("q") / "run"
    run_dir.mkdir()
    before = set(threading.enumerate())
    world = QueueWorld(run_dir, request.param, relay)
    yield world
    world.close()
    assert eventually(lambda: not _new_since(before), message=f"left: {_new_since(before)}")


# Workers of that world; the names say what a test has them do.


@pytest.fixture
def owner(world: QueueWorld) -> Member:
    return world.worker("a")


@pytest.fixture
def producer(world: QueueWorld) -> Member:
    return world.worker("b")


@pytest.fixture
def consumer(world: QueueWorld) -> Member:
    return world.worker("c")


first = producer
second = other = consumer


@pytest.fixture
def own(world: QueueWorld) -> Iterator[Own]:
    processes: list[OwnerProcess] = []

    def start(size: int) -> OwnerProcess:
        process = OwnerProcess("owner", world.run_dir, world.route, world.relay, size=size)
        world.add("owner", process.inbox, {"queue/q": 1})
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.close()


def _new_since(before: set[threading.Thread]) -> list[threading.Thread]:
    """But for those of the process, which end with it."""
    kept = {"queue-cleanup", "bus-retry"}
    new = [thread for thread in threading.enumerate() if thread not in before and thread.name not in kept]
    return [thread for thread in new if thread.name.startswith(("bus-", "queue-"))]
