"""What a loader worker keeps for whom, and how its consumers choose among such workers. No bus, no process."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.runtime import InstantBus, worker_of
from unified.bus.calls.inbound import Caller
from unified.core.directory import WorkerDirectory
from unified.errors import LoaderError, RouteLostError, RpcNotFoundError, RpcTimeoutError, UsageError, WorkerDiedError
from unified.loader import iterator, service
from unified.loader.messages import (
    BringParts,
    DropLoader,
    FetchBatch,
    FetchedBatch,
    LoaderMessage,
    OpenStream,
    StreamLostError,
)
from unified.loader.role_workers import METHOD, RoleWorkers, role_that_loads
from unified.loader.service import HostedLoaders
from unified.loader.stream_host import LoaderParts, StreamHost
from unified.protocol.records import DirectoryEntry, Inbox, Reachability
from unified.worker.context import Worker, set_current_worker

ALICE = Caller("trainer_1-0_1-0", "a" * 24)
PARTS = LoaderParts(dataset=[10, 11, 12], collate_fn=list, has_batches=True)


@pytest.fixture(autouse=True)
def leave_the_stage() -> Iterator[None]:
    yield
    StreamHost._leave_stage()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = worker_of(InstantBus(), trainer=2, data=3)
    set_current_worker(worker)
    yield worker
    set_current_worker(None)


def entry(inbox_id: str, state: Reachability = Reachability.ALIVE, incarnation: int = 0) -> DirectoryEntry:
    inbox = Inbox(inbox_id=inbox_id) if inbox_id else None
    return DirectoryEntry(worker=ALICE.worker, incarnation=incarnation, state=state, inbox=inbox)


def serving(*keys: str) -> HostedLoaders:
    loaders = HostedLoaders("data_1-0_1-0", "n1")
    for key in keys:
        loaders.handle(BringParts(key, PARTS.pack()), ALICE)
        loaders.handle(OpenStream(key, 0, 1, 7, 0, 0), ALICE)
    return loaders


def fetch(loaders: HostedLoaders, key: str, task: Any = (0, 2)) -> Any:
    return loaders.handle(FetchBatch(key, 0, 0, task), ALICE)


def test_orders_of_one_loader() -> None:
    loaders = serving("a", "b")
    reply = fetch(loaders, "a")
    assert isinstance(reply, FetchedBatch)
    assert iterator.unwrap(reply.value) == [10, 12]
    loaders.handle(DropLoader("a"), ALICE)
    with pytest.raises(StreamLostError, match="does not know loader a"):
        fetch(loaders, "a")
    assert iterator.unwrap(fetch(loaders, "b").value) == [10, 12]


def test_a_batch_that_plain_pickle_cannot_say_goes_by_value() -> None:
    loaders = HostedLoaders("data_1-0_1-0", "n1")
    parts = LoaderParts(dataset=[1], collate_fn=lambda keys: lambda: keys, has_batches=True)
    loaders.handle(BringParts("f", parts.pack()), ALICE)
    loaders.handle(OpenStream("f", 0, 1, 7, 0, 0), ALICE)
    assert iterator.unwrap(fetch(loaders, "f", [0]).value)() == [1]


@pytest.mark.parametrize(
    ("news", "is_kept"),
    [
        (entry(ALICE.inbox_id), True),
        (entry("", Reachability.DEAD), False),
        (entry("", Reachability.ENDED), False),
        (entry("b" * 24, incarnation=1), False),
    ],
    ids=["alive", "dead", "ended", "next incarnation"],
)
def test_what_a_dead_consumer_had_is_let_go(news: DirectoryEntry, is_kept: bool) -> None:
    loaders = serving("a")
    directory = WorkerDirectory()
    directory.merge([entry(ALICE.inbox_id)])
    loaders.learn(directory.merge([news]))
    if is_kept:
        fetch(loaders, "a")
    else:
        with pytest.raises(StreamLostError):
            fetch(loaders, "a")


def test_orders_in_line_of_a_dropped_loader_are_not_carried_out() -> None:
    loaders = serving("a")
    service.take_order(DropLoader("a"))
    with pytest.raises(StreamLostError, match="was dropped"):
        fetch(loaders, "a")
    loaders.handle(DropLoader("a"), ALICE)
    assert "a" not in service._dropped
    while not service._line.empty():
        service._line.get()


def test_the_role_is_found_by_its_entry_point(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert role_that_loads(worker) is None
    monkeypatch.setattr("unified.loader.role_workers.SERVICE", worker.workers_of("data")[0].role_spec.entry_point)
    assert role_that_loads(worker) == "trainer", "the first that has it: here every role has"


def test_a_role_that_is_not_there_is_told(worker: Worker) -> None:
    with pytest.raises(UsageError, match=r"no role 'dat' to load data\. Did you mean 'data'"):
        iterator.choose_workers(PARTS, "key", 1, role="dat", local=False)


class Orders(InstantBus):
    """Takes orders of a loader, and answers none."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, LoaderMessage]] = []

    def call(self, target: str, method: str, args: Any, *_: Any, **options: Any) -> Any:
        assert method == METHOD
        self.given.append((target, args[0]))
        return Future()

    def call_many(self, targets: Any, method: str, args: Any, *_: Any, **options: Any) -> Any:
        return [self.call(target, method, args) for target in targets]


def test_parts_travel_once_to_each_place_and_again_after_it_was_lost(worker: Worker) -> None:
    bus = Orders()
    worker.bus = bus  # type: ignore[assignment]
    workers = RoleWorkers(worker, worker.workers_of("data"), key="key", packed=b"parts")
    assert workers.initial_workers(4) == [0, 1, 2, 0]
    workers.prepare([0, 1, 0])
    workers.open(1, OpenStream("key", 0, 1, 7, 0, 0))
    found = [(target[-7:], type(message).__name__) for target, message in bus.given]
    assert found == [("3-0_1-0", "BringParts"), ("3-1_1-0", "BringParts"), ("3-1_1-0", "OpenStream")]
    assert "data_3-1" in workers.lost(1, WorkerDiedError("killed by SIGKILL"))
    bus.given.clear()
    workers.open(1, OpenStream("key", 0, 1, 7, 0, 0))
    assert [type(message).__name__ for _, message in bus.given] == ["BringParts", "OpenStream"]
    bus.given.clear()
    workers.close()
    got = [(target[-7:], message) for target, message in bus.given]
    assert got == [("3-0_1-0", DropLoader("key")), ("3-1_1-0", DropLoader("key"))]


@pytest.mark.parametrize("error", [WorkerDiedError("x"), RouteLostError("x"), StreamLostError("x")])
def test_errors_that_mean_a_lost_place(worker: Worker, error: Exception) -> None:
    workers = RoleWorkers(worker, worker.workers_of("data"), key="key", packed=b"")
    assert workers.lost(0, error)
    assert not workers.lost(0, RpcTimeoutError("x"))
    with pytest.raises(LoaderError, match=r"serves no data loader.*unified\.loader\.service\.serve"):
        workers.lost(0, RpcNotFoundError("x"))
