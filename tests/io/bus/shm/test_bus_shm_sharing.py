"""Payloads through shared memory: the same bytes, in other processes, without a copy there, and the slot comes back."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.shared_memory import Side, names, peers
from unified.bus.codec.codec import SerializedValue, decode, deserialize, encode
from unified.bus.shm.files import identity
from unified.bus.shm.reader import IDLE_S as READER_IDLE_S
from unified.bus.shm.reader import SharedReader, borrowed_behind
from unified.bus.shm.slots import IDLE_S
from unified.errors import ProtocolError

pytestmark = pytest.mark.usefixtures("no_segment_left")
LEFT_TO = ("reader", "consumer", "another")
NBYTES = 300_000


def test_another_process_reads_it_and_lets_go_without_a_message(directory: str, owner: Side) -> None:
    with peers(directory, "reader") as [reader]:
        for item in range(5):
            body, shared, frames = owner.send(np.full(NBYTES, item, "u1"), "reader")
            assert not frames
            assert reader.receive("owner", body, shared) == item * NBYTES
            reader.ask("drop")
        assert names(directory) == ["unified-owner-0"], "one slot was used again and again"
        assert os.stat(Path(directory, "unified-owner-0")).st_mode & 0o777 == 0o600


def test_a_slot_that_is_read_is_not_used_again(directory: str, owner: Side) -> None:
    with peers(directory, "reader") as [reader]:
        for item in range(3):
            assert reader.receive("owner", *owner.send(np.full(NBYTES, item, "u1"), "reader")[:2]) == item * NBYTES
        assert reader.ask("sums") == [0, NBYTES, 2 * NBYTES]
        assert len(names(directory)) == 3
        reader.ask("drop")
        owner.send(np.zeros(NBYTES, "u1"), "reader")
        assert len(names(directory)) == 3


def test_many_readers_of_one_copy(directory: str, owner: Side) -> None:
    exported = owner.pool.export([bytes([7]) * NBYTES], num_readers=3)
    assert exported is not None
    side = Side(directory, "x")
    granted = [owner.pool.grant(exported, f"r{index}") for index in range(3)]
    views = [side.reader.borrow("owner", each.shared or [], []) for each in granted]
    assert owner.pool.grant(exported, "one too many").shared is None
    exported.release()
    assert all(bytes(view) == b"\7" * NBYTES for [view] in views)
    assert len(names(directory)) == 1


def test_frames_and_parts_keep_their_order(directory: str, owner: Side) -> None:
    buffers: list[Any] = [bytes([index]) * 40_000 for index in range(6)]
    exported = owner.pool.export(buffers)
    assert exported is not None
    lent = owner.reader.borrow("owner", owner.pool.grant(exported, "owner").shared or [], [])
    assert [bytes(buffer) for buffer in lent] == buffers
    small: Any = b"wire" * 100
    mixed = [lent[4], small, lent[1], lent[2], small]
    exported = owner.pool.export(mixed)
    assert exported is not None
    granted = owner.pool.grant(exported, "another")
    assert granted.frames == [small, small]
    assert [bytes(each) for each in owner.reader.borrow("owner", granted.shared or [], granted.frames)] == [
        bytes(each) for each in mixed
    ]


def test_what_is_small_is_left_to_the_wire(owner: Side) -> None:
    assert owner.pool.export([b"x" * 10_000]) is None
    assert owner.pool.export([]) is None
    assert owner.pool._table.total_bytes == 0


def test_arrays_are_read_only_and_keep_their_memory(owner: Side) -> None:
    array = owner.receive("owner", *owner.send(np.arange(100_000), "owner")[:2])
    assert borrowed_behind(memoryview(array)) is not None
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    part = array[5:7]
    del array
    other = owner.receive("owner", *owner.send(np.zeros(100_000, "i8"), "owner")[:2])
    assert part.tolist() == [5, 6], "a view of it keeps the reference"
    assert other.sum() == 0


def test_a_tensor_of_the_only_reader_may_be_written_to(directory: str, owner: Side) -> None:
    tensor = torch.zeros(NBYTES)
    back = owner.receive("owner", *owner.send({"weights": tensor}, "owner")[:2])["weights"]
    back += 1
    assert back.sum() == NBYTES
    assert tensor.sum() == 0
    del back
    assert owner.receive("owner", *owner.send(torch.zeros(NBYTES), "owner")[:2]).sum() == 0
    assert len(names(directory)) == 1


def test_readers_of_one_tensor_do_not_see_each_others_writes(owner: Side) -> None:
    for number in range(3):  # the second time in memory that was written to before
        sealed = encode([torch.full((NBYTES,), float(number)), torch.ones(NBYTES)])
        exported = owner.pool.export(sealed.buffers, num_readers=2)
        assert exported is not None
        granted = [owner.pool.grant(exported, "owner") for _ in range(2)]
        received = [owner.reader.borrow("owner", each.shared or [], []) for each in granted]
        exported.release()
        one, other = (decode(sealed.body, buffers) for buffers in received)
        one[0] += 5
        assert one[0].sum() == (number + 5) * NBYTES
        assert other[0].sum() == number * NBYTES
        assert one[1].sum() == NBYTES
        del one, other, received
        gc.collect()
    assert owner.pool._table.total_bytes < 4 * 1024 * 1024


def test_a_sealed_value_stays_as_it_is_however_often_it_is_opened(owner: Side) -> None:
    sealed = owner.receive("owner", *owner.send([encode(torch.ones(NBYTES))], "owner")[:2])[0]
    assert isinstance(sealed, SerializedValue)
    first = deserialize(sealed)
    first += 1
    assert deserialize(sealed).sum() == NBYTES
    assert sealed.detach().buffers[0] is sealed.buffers[0], "shared memory does not change and need not be copied"


def test_a_sealed_value_is_handed_on_without_a_copy(directory: str, owner: Side) -> None:
    with peers(directory, "producer", "consumer") as [producer, consumer]:
        body, shared = producer.send(NBYTES, 3, "owner")
        sealed = SerializedValue(body, owner.reader.borrow("producer", shared, []))
        body, handed_on, frames = owner.send(sealed, "consumer")
        assert owner.pool._table.total_bytes == 0
        assert handed_on is not None
        assert not frames
        del sealed  # the consumer has its own reference, though it has not yet taken it up
        producer.send(NBYTES, 4, "owner")
        opened = consumer.ask("receive", "owner", body.hex(), handed_on)
        assert opened == 3 * NBYTES


def test_a_received_array_is_handed_on_without_a_copy(directory: str, owner: Side) -> None:
    with peers(directory, "producer", "consumer") as [producer, consumer]:
        body, shared = producer.send(NBYTES, 3, "owner")
        array = owner.receive("producer", body, shared)
        body, shared_on, _ = owner.send({"again": array.reshape(2, -1)}["again"], "consumer")
        assert owner.pool._table.total_bytes == 0
        assert consumer.receive("owner", body, shared_on) == 3 * NBYTES
        body, part, _ = owner.send(array[:-5], "consumer")
        assert owner.pool._table.total_bytes == 0, "and so is any part of it"
        assert consumer.receive("owner", body, part) == 3 * (NBYTES - 5)
        body, copied, _ = owner.send(array[::2], "consumer")
        assert owner.pool._table.total_bytes > 0, "what is not contiguous is copied"
        assert consumer.receive("owner", body, copied) == 3 * NBYTES // 2


def test_what_was_handed_on_can_be_handed_on_by_copies(directory: str, owner: Side) -> None:
    middle, last = Side(directory, "middle"), Side(directory, "last")
    body, shared, _ = owner.send(np.full(NBYTES, 9, "u1"), "middle")
    array = middle.receive("owner", body, shared)
    body, shared, _ = middle.send(array, "last")
    again = last.receive("middle", body, shared)
    assert middle.pool._table.total_bytes == 0
    body, shared, _ = last.send(again, "owner")
    assert last.pool._table.total_bytes > 0
    assert owner.receive("last", body, shared).sum() == 9 * NBYTES
    middle.pool.close()
    last.pool.close()


def test_a_batch_of_sealed_values_is_handed_on_one_by_one(directory: str, owner: Side) -> None:
    producer = Side(directory, "producer")
    body, shared, _ = producer.send([encode(np.full(50_000, item, "u1")) for item in range(100)], "owner")
    batch = owner.receive("producer", body, shared)
    assert len(names(directory)) == 1
    for item, sealed in enumerate(batch):
        body, shared, frames = owner.send(sealed, "consumer")
        assert not frames
        assert deserialize(decode(body, owner.reader.borrow("owner", shared or [], []))).sum() == item * 50_000
    assert owner.pool._table.total_bytes == 0
    del batch, sealed
    producer.pool.close()


def test_what_was_exported_and_dropped_frees_the_slot(directory: str, owner: Side) -> None:
    for _ in range(3):
        assert owner.pool.export([b"x" * NBYTES]) is not None
    assert len(names(directory)) == 1


def test_idle_slots_and_mappings_are_given_back(directory: str, owner: Side) -> None:
    array = owner.receive("owner", *owner.send(np.arange(100_000), "owner")[:2])
    now = time.monotonic()
    assert owner.pool.trim(now + 1000)
    assert names(directory), "it is still read"
    del array
    assert owner.pool.trim(now + 1000)
    assert not owner.pool.trim(now + 1001 + IDLE_S)
    assert not names(directory)
    assert not owner.reader.trim(now), "its owner closed it"
    owner.receive("owner", *owner.send(np.arange(100_000), "owner")[:2])
    assert owner.reader.trim(time.monotonic())
    assert not owner.reader.trim(time.monotonic() + READER_IDLE_S)


def test_threads_that_send_and_receive_at_once(owner: Side) -> None:
    def work(seed: int) -> list[int]:
        wrong = []
        for item in range(60):
            size = 70_000 + (seed * 7919 + item * 104_729) % 2_000_000
            value = np.full(size, (seed + item) % 251, "u1")
            if not np.array_equal(owner.receive("owner", *owner.send(value, "owner")[:2]), value):
                wrong.append(item)
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [[]] * 4


def test_no_descriptor_stays_open(directory: str, owner: Side) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = [owner.receive("owner", *owner.send(torch.ones(NBYTES), "owner")[:2]) for _ in range(20)]
    assert len(names(directory)) == len(held)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "part",
    [
        ["", 0, 99, 0, 0, 1, False],
        ["", 0, 1, 5, 0, 1, False],
        ["", 0, 1, -1, 0, 1, False],
        ["", 0, 1, 1 << 40, 0, 1, False],
        ["", 0, 1, 0, 0, 2, False],
        ["", 0, 1, 0, -1, 1, False],
        ["", 0, 1, 0, 0, -1, False],
        ["", 7, 1, 0, 0, 1, False],
        ["", "0", 1, 0, 0, 1, False],
        ["../owner", 0, 1, 0, 0, 1, False],
        ["/../../x", 0, 1, 0, 0, 1, False],
        ["a\0b", 0, 1, 0, 0, 1, False],
        [None, 0, 1, 0, 0, 1, False],
        ["", 0, 1, 0, [0, 1 << 40], 1, False],
        ["", 0, 1, 0, [-64, 128], 1, False],
        ["", 0, 1, 0, [64, -64], 1, False],
        ["", 0, 1, 0, [0.5, 64], 1, False],
        ["", 0, 1, 0, [0], 1, False],
        ["", 0],
        [],
        "part",
        None,
        1,
    ],
    ids=repr,
)
def test_a_descriptor_that_leads_nowhere_is_a_protocol_error(directory: str, owner: Side, part: Any) -> None:
    _, shared, _ = owner.send(np.zeros(NBYTES, "u1"), "owner")
    assert shared == [["", 0, 1, 0, 0, 1, True]]
    with pytest.raises(ProtocolError):
        owner.reader.borrow("owner", [part], [])


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(100_000)])
def test_a_file_that_is_no_segment_is_a_protocol_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "unified-owner-0").write_bytes(content)
    with pytest.raises(ProtocolError):
        SharedReader(str(tmp_path)).borrow("owner", [["", 0, 1, 0, 0, 1, True]], [])


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(100_000))
    (tmp_path / "unified-owner-0").symlink_to(target)
    with pytest.raises(ProtocolError, match="cannot be opened"):
        SharedReader(str(tmp_path)).borrow("owner", [["", 0, 1, 0, 0, 1, True]], [])


def test_frames_that_are_missing_are_a_protocol_error(owner: Side) -> None:
    with pytest.raises(ProtocolError, match="names 2 frames of its 1"):
        owner.reader.borrow("owner", [2], [b"x"])


def test_the_identity_of_a_mount(directory: str, tmp_path: Path) -> None:
    assert identity() == identity("/dev/shm") != ""
    assert identity(directory) != identity()
    assert identity(str(tmp_path / "missing")) == ""
