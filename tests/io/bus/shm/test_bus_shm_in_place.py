"""Arrays made in shared memory: whoever they are sent to sees that very memory, and it comes back when all are done."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bus import DEADLINE_S, World, entry
from tests.support.shared_memory import Side, names, peers, run_code
from unified.bus.codec.codec import decode, deserialize, encode
from unified.bus.shm.allocation import allocation_at
from unified.bus.shm.files import Sweeper, segment_name
from unified.bus.shm.pool import ALLOCATION_READERS, SharedPool
from unified.bus.shm.slots import IDLE_S
from unified.worker import context
from unified.worker.shared_arrays import shared_empty

pytestmark = pytest.mark.usefixtures("no_segment_left")
NBYTES = 300_000


def allocated(side: Side, item: int = 1, nbytes: int = NBYTES) -> np.ndarray:
    memory = side.pool.allocate(nbytes)
    assert memory is not None
    array = np.frombuffer(memory, "u1")
    array.fill(item)
    return array


def is_shared(array: np.ndarray) -> bool:
    return allocation_at(array.__array_interface__["data"][0], array.nbytes) is not None


@dataclass
class Batch:
    weights: torch.Tensor
    tokens: Any


def test_another_process_reads_the_memory_that_was_written(directory: str, owner: Side) -> None:
    with peers(directory, "reader") as [reader]:
        array = allocated(owner)
        early = array[:1]
        assert reader.receive("owner", *owner.send(array, "reader")[:2]) == NBYTES
        early[0] = 100
        assert reader.ask("sums") == [NBYTES + 99], "there is but one"
        assert names(directory) == [segment_name("owner", 0)]


def test_sending_gives_it_away(owner: Side) -> None:
    array, kept, unsent = allocated(owner), allocated(owner), allocated(owner)
    body, shared, _ = owner.send([array, Batch(torch.ones(3), kept), unsent[::2], unsent[:100]], "owner")
    for sent in (array, kept):
        with pytest.raises(ValueError, match="read-only"):
            sent[0] = 2
    unsent[0] = 2  # copies of it were sent
    received = owner.receive("owner", body, shared)
    assert not received[0].flags.writeable
    assert received[2][0] == 1


def test_wherever_it_is_inside_a_value_nothing_is_copied(directory: str, owner: Side) -> None:
    array = allocated(owner).view("f4")
    array[:] = np.arange(array.size)
    tensor = torch.from_numpy(allocated(owner).view("f4"))
    tensor.fill_(2)
    state = {"model": {"w": tensor, "tied": tensor, "row": tensor[10_000:20_000].reshape(100, 100)}}
    value = [Batch(tensor[:50_000], array[:20_000].reshape(2, -1)), state, array.reshape(-1, 3).T]
    body, shared, frames = owner.send(value, "owner")
    assert not frames
    assert len(names(directory)) == 2
    batch, state, turned = owner.receive("owner", body, shared)
    assert torch.equal(batch.weights, tensor[:50_000])
    assert np.array_equal(batch.tokens, np.arange(20_000, dtype="f4").reshape(2, -1))
    assert torch.equal(state["model"]["row"], torch.full((100, 100), 2.0))
    assert np.array_equal(turned, array.reshape(-1, 3).T)
    assert owner.pool._table.total_bytes == 2 * 512 * 1024
    state["model"]["w"][0] = 9
    assert (int(state["model"]["tied"][0]), int(tensor[0])) == (9, 2), "a receiver writes to its own"


def test_a_slot_comes_back_when_maker_and_readers_have_let_go(directory: str, owner: Side) -> None:
    with peers(directory, "one", "other") as [one, other]:
        array = allocated(owner)
        view = array[1000:]
        for _ in range(2):
            one.receive("owner", *owner.send(array, "one")[:2])
            other.receive("owner", *owner.send(view, "other")[:2])
        del array
        one.ask("drop")
        other.ask("drop")
        allocated(owner, 5)
        assert names(directory) == [segment_name("owner", 0), segment_name("owner", 1)], "the view still is looked at"
        assert other.receive("owner", *owner.send(view, "other")[:2]) == NBYTES - 1000
        del view
        allocated(owner, 6)
        assert len(names(directory)) == 2, "and now the other reader does"
        assert other.ask("sums") == [NBYTES - 1000]
        other.ask("drop")
        now = time.monotonic()
        owner.pool.trim(now)
        assert not owner.pool.trim(now + 1 + IDLE_S)
        assert names(directory) == []


def test_it_can_be_sent_for_ever(directory: str, owner: Side) -> None:
    array = allocated(owner)
    held = [owner.receive("owner", *owner.send(array, "owner")[:2]) for _ in range(ALLOCATION_READERS)]
    assert owner.pool._table.total_bytes == 512 * 1024
    body, shared, frames = owner.send(array, "owner")
    assert not frames
    assert owner.receive("owner", body, shared).sum() == NBYTES
    assert owner.pool._table.total_bytes == 2 * 512 * 1024, "to more than that at one time it goes by a copy"
    held.clear()
    for _ in range(3 * ALLOCATION_READERS):
        assert owner.receive("owner", *owner.send(array, "owner")[:2]).sum() == NBYTES
    assert len(names(directory)) == 2


def test_many_receivers_of_one_message(directory: str, owner: Side) -> None:
    array = allocated(owner, 3)
    encoded = encode({"same": array})
    exported = owner.pool.export(encoded.buffers, num_readers=5)
    assert exported is not None
    received = [owner.receive("owner", encoded.body, owner.pool.grant(exported, "owner").shared) for _ in range(5)]
    exported.release()
    assert [each["same"].sum() for each in received] == [3 * NBYTES] * 5
    assert len(names(directory)) == 1


def test_a_receiver_hands_it_on_without_a_copy(directory: str, owner: Side) -> None:
    with peers(directory, "consumer") as [consumer]:
        queue = Side(directory, "queue")
        body, shared, _ = owner.send([encode(allocated(owner, 3))], "queue")
        [item] = queue.receive("owner", body, shared)
        body, shared, frames = queue.send(item, "consumer")
        del item
        assert not frames
        assert consumer.receive("queue", body, shared) == 3 * NBYTES
        assert len(names(directory)) == 1
        queue.pool.close()


def test_a_sealed_value_that_stays_here_keeps_the_memory(owner: Side) -> None:
    array = allocated(owner, 3)
    sealed = encode({"a": array}).detach()
    assert is_shared(np.frombuffer(sealed.buffers[0], "u1"))
    del array
    assert deserialize(sealed)["a"].sum() == 3 * NBYTES


def test_data_outlives_its_makers_death(directory: str, owner: Side) -> None:
    code = (
        "import sys, json, os, numpy as np\n"
        "from tests.support.shared_memory import Side\n"
        "side = Side(sys.argv[1], 'maker')\n"
        "arrays = [np.frombuffer(side.pool.allocate(300_000), 'u1') for _ in range(2)]\n"
        "arrays[0].fill(7)\n"
        "body, shared, frames = side.send(arrays[0], 'owner')\n"
        "print(json.dumps([body.hex(), shared]), flush=True)\n"
        "sys.stdin.read()\n"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", code, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    body, shared = decode_line(maker.stdout.readline())
    array = owner.receive("maker", body, shared)
    maker.kill()
    maker.communicate()
    assert Sweeper(directory).sweep(0.0, time.time()) == [segment_name("maker", 1)]
    assert array.sum() == 7 * NBYTES
    owner.reader.forget("maker")
    del array
    assert names(directory) == []


def decode_line(line: str) -> tuple[bytes, list[Any]]:
    body, shared = json.loads(line)
    return bytes.fromhex(body), shared


def test_a_pool_that_ends_leaves_the_maker_its_array(directory: str, owner: Side) -> None:
    array = allocated(owner)
    owner.pool.close()
    assert names(directory) == []
    array += 1
    assert array.sum() == 2 * NBYTES
    assert owner.pool.allocate(NBYTES) is None
    assert owner.send(array, "owner")[1] is None, "it goes by the wire"


def test_where_there_is_no_room_there_is_none(directory: str, tmp_path: Any) -> None:
    pool = SharedPool("inbox", directory=directory, quota_bytes=1024 * 1024)
    assert pool.allocate(1000) is None, "too small to be worth a slot"
    memory = pool.allocate(1_000_000)
    assert memory is not None
    assert pool.allocate(NBYTES) is None
    assert pool.export([bytes(NBYTES)]) is None, "it counts"
    del memory
    assert pool.export([bytes(NBYTES)]) is not None
    pool.close()
    missing = SharedPool("inbox", directory=str(tmp_path / "missing"), quota_bytes=1 << 30)
    assert missing.allocate(NBYTES) is None


FORK = """
import gc, os, sys
import numpy as np
from tests.support.shared_memory import Side

directory = sys.argv[1]
side = Side(directory, "owner")
array = np.frombuffer(side.pool.allocate(300_000), "u1")
array.fill(5)
child = os.fork()
if child == 0:
    refused = side.pool.allocate(300_000) is None and side.send(array, "owner")[1] is None
    total = int(array.sum())
    del array
    gc.collect()
    side.pool.close()
    os._exit(0 if refused and total == 1_500_000 else 1)
assert os.waitpid(child, 0)[1] == 0
side.send(np.zeros(300_000, "u1"), "owner")
assert array.sum() == 1_500_000
assert len(os.listdir(directory)) == 2
side.pool.forget("owner")
side.pool.close()
assert not os.listdir(directory)
"""


def test_a_fork_takes_nothing_from_its_parent(directory: str) -> None:
    run_code(FORK, directory)


def test_calls_streams_and_groups_on_every_route(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller holds is what the handler made, where the two share memory; the same values anywhere."""
    made: list[np.ndarray] = []

    def make(item: int) -> np.ndarray:
        array = shared_empty((300, 1000))
        made.append(array[:])
        array.fill(item)
        return array

    def many(count: int) -> Iterator[np.ndarray]:
        yield from map(make, range(count))

    a, b = world.pair({"make": make, "many": many, "same": lambda array: array})
    a.update_directory([entry("c", world.endpoint("c", {"same": lambda array: array})[1])])
    monkeypatch.setattr(context, "_current", SimpleNamespace(bus=b))
    results = [a.call("b", "make", (4,), {}, timeout=DEADLINE_S).result(), *a.call("b", "many", (2,), {}).result()]
    assert [result.sum() for result in results] == [1_200_000, 0, 300_000]
    monkeypatch.setattr(context, "_current", SimpleNamespace(bus=a))
    array = make(2)
    echoes = [call.result(DEADLINE_S) for call in a.call_many(["b", "c"], "same", (array,), {})]
    assert [echo.sum() for echo in echoes] == [600_000] * 2
    sent = [*results, echoes[0]]
    for place, memory in enumerate(made):
        memory[0, 0] = 77
        assert (sent[place][0, 0] == 77) == (world.route == "auto")
    assert array.flags.writeable == (world.route != "auto")


def test_values_of_every_kind_that_numpy_has(owner: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_current", SimpleNamespace(bus=SimpleNamespace(allocate=owner.pool.allocate)))
    for dtype in ("f8", "<M8[s]", ">i4", "U7", "?", [("a", "f4"), ("b", "i8")], np.complex64):
        array = shared_empty((100, 200), dtype)
        assert (array.shape, array.dtype) == ((100, 200), np.dtype(dtype))
        assert is_shared(array) == (array.nbytes >= 64 * 1024)
        array[...] = np.zeros((), dtype)
        body, shared, frames = owner.send(array, "owner")
        back = decode(body, owner.reader.borrow("owner", shared or [len(frames)], frames))
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
    wide = torch.from_numpy(shared_empty(NBYTES, "int16")).view(torch.bfloat16)
    wide.fill_(1.5)
    before = owner.pool._table.total_bytes
    assert torch.equal(owner.receive("owner", *owner.send(wide, "owner")[:2]), wide)
    assert owner.pool._table.total_bytes == before
