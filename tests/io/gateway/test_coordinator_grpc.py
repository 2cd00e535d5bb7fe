"""The coordinator over gRPC: a real master, our service before it, and a client that grpcio-tools generated."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode as Code

from tests.support.data_files import samples, write_jsonl
from tests.support.deadlines import met, missed
from tests.support.grpc_client import TOKEN, TOKENS, GeneratedClient, Stub, served
from tests.support.master_process import StartMaster
from unified.client.daemons import Daemon
from unified.coordinator.client import RemoteCoordinator
from unified.coordinator.orchestrator import leave_barrier
from unified.data import DatasetRegistry, TrainingOrchestrator, iter_samples
from unified.errors import UsageError
from unified.protocol.coordinator import FileRun, ShardAssignment
from unified.testing import eventually
from unified_gateway import coordinator_calls
from unified_gateway.coordinator_grpc import MAX_DETAILS, MAX_REQUEST, serve
from unified_gateway.tokens import Tokens

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[3] / "docs/coordinator-grpc.md"
ROWS = 40
DEAD_AFTER_S = 3.0
"""Seconds of silence after which a worker is lost that has to be heard once before."""


@pytest.fixture
def address(start_master: StartMaster) -> str:
    return start_master().address


@pytest.fixture
async def stub(generated: GeneratedClient, address: str) -> AsyncIterator[Stub]:
    async with served(address) as port, Stub(generated, port) as stub:
        yield stub


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two files of one dataset."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "part-1.jsonl", samples(0, 25))
    write_jsonl(folder / "part-2.jsonl", samples(25, ROWS))
    return folder


async def read_all(stub: Stub, who: dict[str, str], dataset_id: str = "d", epoch: int = 0) -> list[int]:
    """Read a worker's shards to the end of the epoch, as a client in any language would."""
    numbers: list[int] = []
    done: list[int] = []
    while True:
        shard = await stub.GetDataShard(dataset_id=dataset_id, epoch=epoch, done_shard_ids=done, **who)
        if shard.start_sample < shard.end_sample:
            rows = iter_samples(
                ShardAssignment(
                    shard_id=shard.shard_id,
                    file_paths=list(shard.file_paths),
                    start_sample=shard.start_sample,
                    end_sample=shard.end_sample,
                    first_row=shard.first_row,
                )
            )
            numbers += [row["number"] for row in rows]
            done = [shard.shard_id]
        elif shard.num_left:  # others are reading the rest
            done = []
            await asyncio.sleep(0.01)
        else:
            return numbers


async def test_a_training_of_two_workers_needs_no_other_call(stub: Stub, data: Path) -> None:
    first, second = (
        await stub.register(0, 2, hostname="a", gpu_count=8, metadata={"zone": "x"}),
        await stub.register(1, 2),
    )
    assert (await stub.Heartbeat(**first)).is_known
    registered = await stub.RegisterDataset(dataset_id="d", path=str(data), format="jsonl", shard_size=4, shuffle=True)
    assert (registered.dataset_id, registered.num_shards, registered.epoch) == ("d", 10, 0)
    for epoch in range(2):
        met = await asyncio.gather(
            *(stub.WaitBarrier(barrier_id="epoch", world_size=2, arrival=epoch + 1, **who) for who in (first, second))
        )
        assert [(each.generation, list(each.arrived)) for each in met] == [(epoch, ["w0", "w1"])] * 2
        parts = await asyncio.gather(*(read_all(stub, who, epoch=epoch) for who in (first, second)))
        assert sorted(chain(*parts)) == list(range(ROWS))
        assert all(parts)
    assert not (await stub.GetLatestCheckpoint()).is_found
    notice = {"step": 7, "path": "s3://b/step-7", "size_bytes": 1 << 40, "checksum": "c", "world_size": 2}
    assert (await stub.NotifyCheckpoint(worker_id="w0", metadata={"loss": "1"}, **notice)).is_latest
    assert not (await stub.NotifyCheckpoint(worker_id="w1", step=6, path="s3://b/step-6")).is_latest
    found = await stub.GetLatestCheckpoint()
    assert {name: getattr(found, name) for name in notice} == notice
    assert (found.is_found, found.worker_id, dict(found.metadata), found.saved_at > 0) == (
        True,
        "w0",
        {"loss": "1"},
        True,
    )
    assert not (await stub.Heartbeat(is_leaving=True, **second)).is_known
    assert not (await stub.Heartbeat(**second)).is_known


async def test_the_program_of_the_guide_runs(generated: GeneratedClient, address: str, data: Path) -> None:
    """docs/coordinator-grpc.md, by two processes that share the dataset."""
    program = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    async with served(address) as port:
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(str(generated.messages.__file__)).parent),
            "WORLD_SIZE": "2",
            "TRAINER_API_TOKEN": TOKEN,
            "COORDINATOR": f"127.0.0.1:{port}",
            "DATA": str(data),
        }
        started = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, stdout=PIPE, stderr=PIPE, env={**env, "RANK": str(rank)}
            )
            for rank in range(2)
        ]
        ended = await asyncio.gather(*(each.communicate() for each in started))
    assert [each.returncode for each in started] == [0, 0], ended
    lines = sorted(line.partition(":")[0] for out, _ in ended for line in out.decode().splitlines())
    assert lines == ["samples 0 to 10", "samples 10 to 20", "samples 20 to 30", "samples 30 to 40"]


async def test_programs_in_python_and_others_are_one_world(stub: Stub, address: str, data: Path) -> None:
    with RemoteCoordinator(address) as remote, DatasetRegistry(remote, rank=0, world_size=2) as registry:
        async with TrainingOrchestrator("python", remote, 2, 0) as here:
            there = await stub.register(1, 2)
            await asyncio.gather(
                here.wait_barrier("b"), stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, **there)
            )
            registry.register("d", data, "jsonl", shard_size=4)
            again = await stub.RegisterDataset(dataset_id="d", path=str(data), format="jsonl", shard_size=4)
            assert again.num_shards == 10
            mine = {each.shard_id for each in registry.get_assignment("d", epoch=0)}
            registry.mark_done("d", sorted(mine), 0)
            assert len(await read_all(stub, there)) == ROWS - 4 * len(mine)
            assert 0 < len(mine) < 10, "the rank in another language had a part from the beginning"


async def test_a_dead_workers_shards_go_to_others(stub: Stub, data: Path) -> None:
    await stub.RegisterDataset(dataset_id="d", path=str(data), format="jsonl", shard_size=4)
    living, dead = await stub.register(0, 2), await stub.register(1, 2, timeout_s=missed(DEAD_AFTER_S))
    begun = await stub.GetDataShard(dataset_id="d", **dead)
    assert begun.end_sample > begun.start_sample
    assert sorted(await read_all(stub, living)) == list(range(ROWS))
    status, code, reason = await stub.refusal(stub.GetDataShard(dataset_id="d", **dead))
    assert (status, code) == (Code.FAILED_PRECONDITION, "unknown-worker"), reason
    back = await stub.register(1, 2)
    assert await read_all(stub, back) == []


async def test_a_barrier_ends_when_somebody_is_lost(stub: Stub) -> None:
    living, dead = await stub.register(0, 2), await stub.register(1, 2, timeout_s=missed(0.3))
    status, code, reason = await stub.refusal(stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, **living))
    assert (status, code) == (Code.ABORTED, "lost")
    assert "w1" in reason
    alone = await stub.WaitBarrier(barrier_id="c", world_size=2, arrival=2, on_loss=1, **living)
    assert (list(alone.arrived), list(alone.lost)) == (["w0"], ["w1"])
    assert not (await stub.Heartbeat(**dead)).is_known


async def test_a_barriers_own_time_is_told_to_all_who_wait(stub: Stub) -> None:
    workers = [await stub.register(rank, 3) for rank in range(3)]
    waits = [
        stub.refusal(stub.WaitBarrier(barrier_id="b", world_size=3, arrival=1, **who, **more))
        for who, more in zip(workers, ({"timeout_s": missed(0.2)}, {}), strict=False)
    ]
    for status, code, reason in await asyncio.gather(*waits):
        assert (status, code) == (Code.DEADLINE_EXCEEDED, "timeout")
        assert "missing w2" in reason


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the service has told the master that a worker left its barrier: what is asked next finds it left."""
    event = asyncio.Event()

    def tell(coordinator: Any, request: Any) -> None:
        leave_barrier(coordinator, request)
        event.set()

    monkeypatch.setattr(coordinator_calls, "leave_barrier", tell)
    return event


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "past its deadline"])
async def test_a_call_that_gives_up_leaves_the_barrier(stub: Stub, left: asyncio.Event, is_cancelled: bool) -> None:
    """Nobody is released by an arrival behind which there is no process."""
    first, second = await stub.register(0, 2), await stub.register(1, 2)
    within_s = 50.0 if is_cancelled else missed(0.3)
    gone = stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, within_s=within_s, **first)
    if is_cancelled:
        await stub.Heartbeat(**second)  # on the same connections: once it is answered, the master has the arrival
        gone.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await gone
    await left.wait()
    wait = stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, timeout_s=missed(0.5), **second)
    alone = await stub.refusal(wait)
    assert alone[:2] == (Code.DEADLINE_EXCEEDED, "timeout")
    assert "missing w0" in alone[2]
    await asyncio.gather(*(stub.WaitBarrier(barrier_id="b", world_size=2, arrival=2, **who) for who in (first, second)))


WAITS = """
import sys
sys.path.insert(0, sys.argv[1])
import grpc, coordinator_pb2, coordinator_pb2_grpc
stub = coordinator_pb2_grpc.CoordinatorServiceStub(grpc.insecure_channel(sys.argv[2]))
fields = dict(barrier_id="b", world_size=2, arrival=1, worker_id=sys.argv[3], session=sys.argv[4])
wait = stub.WaitBarrier.future(coordinator_pb2.BarrierRequest(**fields), metadata=[("x-trainer-token", sys.argv[5])])
beat = coordinator_pb2.HeartbeatRequest(worker_id=fields["worker_id"], session=fields["session"])
stub.Heartbeat(beat, metadata=[("x-trainer-token", sys.argv[5])])
print("waits", flush=True)
wait.result()
"""


async def test_a_process_that_is_killed_leaves_the_barrier(
    generated: GeneratedClient, address: str, left: asyncio.Event
) -> None:
    async with served(address) as port, Stub(generated, port) as stub:
        first, second = await stub.register(0, 2), await stub.register(1, 2)
        folder = str(Path(str(generated.messages.__file__)).parent)
        arguments = [folder, f"127.0.0.1:{port}", *first.values(), TOKEN]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", WAITS, *arguments, stdout=PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"waits\n"
        process.kill()
        await process.wait()
        await left.wait()
        wait = stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, timeout_s=missed(0.5), **second)
        alone = await stub.refusal(wait)
        assert alone[:2] == (Code.DEADLINE_EXCEEDED, "timeout")
        assert "missing w0" in alone[2]


@pytest.mark.parametrize("timeout_s", [1e308, 1e15])
async def test_a_barrier_may_have_any_time(stub: Stub, timeout_s: float) -> None:
    """The connection to the master, which all calls share, reckons with it."""
    worker = await stub.register(0, 2)
    within_s = missed(0.3)
    wait = stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, timeout_s=timeout_s, within_s=within_s, **worker)
    assert (await stub.refusal(wait))[0] is Code.DEADLINE_EXCEEDED
    assert (await stub.Heartbeat(**worker)).is_known


async def test_an_arrival_that_is_repeated_is_one(stub: Stub) -> None:
    first, second = await stub.register(0, 2), await stub.register(1, 2)
    met = await asyncio.gather(
        *(stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, **who) for who in (first, second))
    )
    assert await stub.WaitBarrier(barrier_id="b", world_size=2, arrival=1, **first) == met[0]
    counted = await asyncio.gather(*(stub.WaitBarrier(barrier_id="n", world_size=2, **who) for who in (first, second)))
    later = await asyncio.gather(*(stub.WaitBarrier(barrier_id="n", world_size=2, **who) for who in (first, second)))
    assert [each.generation for each in (*counted, *later)] == [0, 0, 1, 1]


async def test_another_gateway_goes_on(generated: GeneratedClient, address: str, data: Path) -> None:
    async with served(address) as port, Stub(generated, port) as stub:
        worker = await stub.register(0, 1)
        await stub.RegisterDataset(dataset_id="d", path=str(data), format="jsonl", shard_size=10)
        shard = await stub.GetDataShard(dataset_id="d", **worker)
    async with served(address) as port, Stub(generated, port) as stub:
        assert (await stub.Heartbeat(**worker)).is_known
        assert await stub.GetDataShard(dataset_id="d", **worker) == shard
        await stub.WaitBarrier(barrier_id="b", world_size=1, **worker)


async def test_the_gateway_serves_it_beside_http(generated: GeneratedClient, address: str, tmp_path: Path) -> None:
    flags = ["--master", address, "--port", "0", "--grpc-port", "0", "--die-with-parent", str(os.getpid())]
    log = tmp_path / "gateway.log"
    gateway = Daemon("unified_gateway", flags, log, {**os.environ, "TRAINER_API_TOKEN": TOKEN})
    try:
        is_ready = partial(re.search, r"event=grpc-ready port=(\d+)")
        found = await asyncio.to_thread(eventually, lambda: gateway.is_ended or is_ready(log.read_text()), 30.0)
        assert isinstance(found, re.Match), gateway.last_words()
        async with Stub(generated, int(found[1])) as stub:
            worker = await stub.register(0, 2)
            waiting = stub.WaitBarrier(barrier_id="b", world_size=2, **worker)
            assert (await stub.Heartbeat(**worker)).is_known
            gateway.signal(signal.SIGTERM)
            assert (await stub.refusal(waiting))[0] in (Code.UNAVAILABLE, Code.CANCELLED)
        assert await asyncio.to_thread(gateway.wait, 10.0)
    finally:
        Daemon.end_all([gateway], 10.0)


@pytest.mark.parametrize("token", [None, "", "secret-of-the-tesT", "ünknown"[1:]])
async def test_without_a_token_nothing_is_asked(generated: GeneratedClient, token: str | None) -> None:
    async with served("127.0.0.1:9") as port, Stub(generated, port, token=token) as stub:
        status, _, reason = await stub.refusal(stub.Heartbeat(worker_id="w0", session="s"))
        assert status is Code.UNAUTHENTICATED
        assert "x-trainer-token" in reason


async def test_without_a_master_calls_are_told_soon(generated: GeneratedClient) -> None:
    async with served("127.0.0.1:9", timeout_s=missed(0.3)) as port, Stub(generated, port) as stub:
        status, _, reason = await stub.refusal(stub.Heartbeat(worker_id="w0", session="s"))
        assert status is Code.UNAVAILABLE
        assert "127.0.0.1:9" in reason
        wait = stub.WaitBarrier(barrier_id="b", session="s", world_size=1, within_s=missed(0.5))
        status, *_ = await stub.refusal(wait)
        assert status is Code.DEADLINE_EXCEEDED


async def test_spaces_see_nothing_of_each_other(generated: GeneratedClient, address: str) -> None:
    async with served(address) as port, Stub(generated, port, space="a") as one, Stub(generated, port) as other:
        await one.NotifyCheckpoint(worker_id="w", step=1, path="/p")
        assert (await one.GetLatestCheckpoint()).is_found
        assert not (await other.GetLatestCheckpoint()).is_found
        worker = await one.register(0, 1)
        assert not (await other.Heartbeat(**worker)).is_known


@pytest.mark.parametrize(
    ("method", "fields", "status", "code", "words"),
    [
        ("RegisterWorker", {}, Code.INVALID_ARGUMENT, "bad-request", "worker_id"),
        ("RegisterWorker", {"worker_id": "w", "rank": 2, "world_size": 2},
         Code.INVALID_ARGUMENT, "bad-request", "rank 2"),
        ("RegisterWorker", {"worker_id": "x", "rank": 0, "world_size": 1}, Code.ALREADY_EXISTS, "name-taken", "w0"),
        ("RegisterWorker", {"worker_id": "w", "timeout_s": float("nan")}, Code.INVALID_ARGUMENT, "bad-request", "nan"),
        ("Heartbeat", {"worker_id": "w0"}, Code.INVALID_ARGUMENT, "bad-request", "session"),
        ("WaitBarrier", {"barrier_id": "b", "worker_id": "w0"}, Code.INVALID_ARGUMENT, "bad-request", "session"),
        ("WaitBarrier", {"worker_id": "w0", "session": "s", "timeout_s": float("nan")},
         Code.INVALID_ARGUMENT, "bad-request", "nan"),
        ("WaitBarrier", {"worker_id": "w0", "session": "s", "timeout_s": -1.0},
         Code.INVALID_ARGUMENT, "bad-request", "-1"),
        ("WaitBarrier", {"barrier_id": "b", "worker_id": "w9", "session": "s", "world_size": 1},
         Code.FAILED_PRECONDITION, "unknown-worker", "register it"),
        ("WaitBarrier", {"barrier_id": "b", "worker_id": "w0", "session": "s", "world_size": 1},
         Code.ABORTED, "replaced", "newer"),
        ("GetDataShard", {"dataset_id": "imagent", "worker_id": "w0"}, Code.NOT_FOUND, "not-found", "Did you mean"),
        ("GetDataShard", {"dataset_id": "imagenet", "worker_id": "w8", "done_shard_ids": [99]},
         Code.INVALID_ARGUMENT, "bad-request", "no shard 99"),
        ("RegisterDataset", {"dataset_id": "imagenet", "path": "/data", "format": "parquet", "total_samples": 4},
         Code.ALREADY_EXISTS, "name-taken", "total_samples"),
        ("RegisterDataset", {"dataset_id": "r", "path": "data", "format": "csv"},
         Code.INVALID_ARGUMENT, "bad-request", "absolute"),
        ("RegisterDataset", {"dataset_id": "r", "path": "/no/such", "format": "csv"}, Code.NOT_FOUND, "", "not there"),
        ("RegisterDataset", {"dataset_id": "r", "path": "/data", "format": "tarball"},
         Code.INVALID_ARGUMENT, "bad-request", "tarball"),
        ("RegisterDataset", {"dataset_id": "r", "path": "/data", "total_samples": 2**64 - 1, "shard_size": 1},
         Code.INVALID_ARGUMENT, "bad-request", "shard_size"),
        ("NotifyCheckpoint", {"worker_id": "w0", "step": 3}, Code.INVALID_ARGUMENT, "bad-request", "path"),
        ("NotifyCheckpoint", {"path": "x" * MAX_REQUEST}, Code.RESOURCE_EXHAUSTED, "", "larger"),
    ],
)  # fmt: skip
async def test_refusals(stub: Stub, method: str, fields: dict[str, Any], status: Code, code: str, words: str) -> None:
    await stub.register(0, 1)
    await stub.RegisterDataset(dataset_id="imagenet", path="/data", format="parquet", total_samples=30)
    found = await stub.refusal(getattr(stub, method)(**fields))
    assert found[:2] == (status, code), found
    assert words in found[2]


async def test_a_long_reason_arrives(stub: Stub) -> None:
    """More metadata than a client takes would hide the status, too."""
    fields = {"dataset_id": "d", "path": "/data", "format": "csv", "total_samples": 3}
    await stub.RegisterDataset(metadata={"note": "🧨" * 100_000}, **fields)
    status, code, reason = await stub.refusal(stub.RegisterDataset(**fields))
    assert (status, code, len(reason)) == (Code.ALREADY_EXISTS, "name-taken", MAX_DETAILS + 1)


async def test_a_number_of_samples_is_taken_as_it_is(stub: Stub) -> None:
    """Files and formats that the gateway cannot see are the client's business."""
    registered = await stub.RegisterDataset(dataset_id="d", path="hdfs://far/away", format="own", total_samples=25_000)
    assert registered.num_shards == 3
    worker = await stub.register(0, 1)
    shard = await stub.GetDataShard(dataset_id="d", **worker)
    assert (list(shard.file_paths), shard.start_sample, shard.end_sample) == (["hdfs://far/away"], 0, 10_000)
    assert (shard.first_row, shard.num_left) == (0, 3)


class Counts:
    """A count of files that ends when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self.may_end = asyncio.Event()
        monkeypatch.setattr(coordinator_calls, "dataset_files", self)
        self.num_asked = 0
        self._absolute = coordinator_calls._absolute
        monkeypatch.setattr(coordinator_calls, "_absolute", self._asked)

    def _asked(self, path: str) -> str:
        self.num_asked += 1
        return self._absolute(path)

    async def asked(self, number: int) -> None:
        """Wait until so many requests have come to the server."""
        async with asyncio.timeout(met(100)):
            while self.num_asked < number:  # noqa: ASYNC110 - counted in a call of the server
                await asyncio.sleep(0.01)

    def __call__(self, path: str, format: str, total: None) -> list[FileRun]:  # noqa: A002
        self.number += 1
        asyncio.run_coroutine_threadsafe(self.may_end.wait(), self._loop).result(100)
        return [FileRun(path=path, num_samples=10)]


async def test_workers_that_register_a_dataset_together_have_it_counted_once(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    fields = {"dataset_id": "d", "path": "/data", "format": "csv", "shard_size": 5}
    asked = [asyncio.ensure_future(stub.RegisterDataset(**fields)) for _ in range(20)]
    gives_up = stub.RegisterDataset(within_s=missed(0.2), **fields)
    assert (await stub.refusal(gives_up))[0] is Code.DEADLINE_EXCEEDED
    await counts.asked(20)
    counts.may_end.set()
    assert {each.num_shards for each in await asyncio.gather(*asked)} == {2}
    assert (await stub.RegisterDataset(**fields)).num_shards == 2
    assert counts.number == 1


async def test_a_count_has_an_end_and_a_bound(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_calls, "COUNT_WITHIN_S", 0.2)
    counts = Counts(monkeypatch)
    for number in range(coordinator_calls.COUNTS_AT_ONCE + 1):
        register = stub.RegisterDataset(dataset_id="d", path=f"/data/{number}", format="csv")
        status, code, reason = await stub.refusal(register)
        is_one_too_many = number == coordinator_calls.COUNTS_AT_ONCE
        assert (status, code) == (
            (Code.RESOURCE_EXHAUSTED, "busy") if is_one_too_many else (Code.DEADLINE_EXCEEDED, "")
        )
        assert "total_samples" in reason
    counts.may_end.set()


async def test_a_port_or_address_that_cannot_be_is_said() -> None:
    async with served("127.0.0.1:9") as port:
        with RemoteCoordinator("127.0.0.1:9") as coordinator:
            with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
                await serve(bind=f"127.0.0.1:{port}", coordinator=coordinator, tokens=TOKENS)
            with pytest.raises(UsageError, match="TRAINER_API_TOKEN"):
                await serve(bind="0.0.0.0:0", coordinator=coordinator, tokens=Tokens({}))
