"""Streams that share a process: each with its own dataset, random numbers and worker info, as if it were alone."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from unified.errors import RemoteError
from unified.loader.messages import (
    FetchBatch,
    FetchedBatch,
    FetchFailure,
    FetchReply,
    OpenStream,
    StreamEnd,
    StreamLostError,
)
from unified.loader.stream_host import LoaderParts, StreamHost

Numbers = tuple[int, float, float, float]


@pytest.fixture(autouse=True)
def leave_the_stage() -> Iterator[None]:
    yield
    StreamHost._leave_stage()


class Draws:
    """Samples are random numbers of every kind, and the stream that drew them."""

    def __getitem__(self, key: int) -> Numbers:
        info: Any = get_worker_info()
        return info.id, random.random(), float(torch.rand(())), float(np.random.rand())


class Counting(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.begin, self.length):
            yield number, random.random()


def parts(dataset: Any, **options: Any) -> LoaderParts:
    return LoaderParts(dataset=dataset, collate_fn=list, has_batches=True, **options)


def host(dataset: Any, **options: Any) -> StreamHost:
    return StreamHost(lambda: parts(dataset, **options), where="here", node="n1")


def opened(stream: int, *, epoch: int = 0, skip: int = 0, seed: int = 7) -> OpenStream:
    return OpenStream("key", stream, 2, seed, epoch, skip)


def fetch(where: StreamHost, stream: int, task: Any = None) -> FetchReply:
    return where.fetch(FetchBatch("key", stream, 0, task))


def values(reply: FetchReply) -> Any:
    assert isinstance(reply, FetchedBatch)
    return reply.value


def test_streams_do_not_disturb_each_other() -> None:
    alone: dict[int, list[Any]] = {}
    for stream in (0, 1):
        where = host(Draws())
        where.open(opened(stream))
        alone[stream] = [values(fetch(where, stream, [0, 1])) for _ in range(3)]
        where.close()
    together, another = host(Draws()), host(Draws())
    for stream in (0, 1):
        together.open(opened(stream))
    another.open(opened(0, seed=99))
    mixed: dict[int, list[Any]] = {0: [], 1: []}
    for _ in range(3):
        for stream in (1, 0):
            mixed[stream].append(values(fetch(together, stream, [0, 1])))
            fetch(another, 0, [5])
    assert mixed == alone
    assert alone[0] != alone[1]
    together.close()
    another.close()
    assert get_worker_info() is None


def test_a_stream_that_is_opened_again_goes_on_where_it_was() -> None:
    """Elsewhere or here: items that were read are read past, and random numbers are those it would have had."""
    where = host(Counting(10), is_iterable=True, batch_size=3)
    where.open(opened(0))
    whole = [fetch(where, 0) for _ in range(5)]
    assert [len(values(reply)) for reply in whole[:4]] == [3, 3, 3, 1]
    assert whole[4] == StreamEnd()
    where.open(opened(0, skip=2))
    assert [fetch(where, 0) for _ in range(3)] == whole[2:]


def test_a_stream_that_does_not_even_begin_leaves_no_worker_info() -> None:
    class Bad(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise KeyError("no such file")

    where = host(Bad(), is_iterable=True, batch_size=1)
    where.open(opened(0))
    assert get_worker_info() is None
    assert isinstance(fetch(where, 0), FetchFailure)


def test_drop_last_of_an_iterable_dataset() -> None:
    where = host(Counting(5), is_iterable=True, batch_size=3, drop_last=True)
    where.open(opened(0))
    assert len(values(fetch(where, 0))) == 3
    assert fetch(where, 0) == StreamEnd()
    assert fetch(where, 0) == StreamEnd()


def test_worker_init_fn_is_called_once_for_each_copy_of_the_dataset() -> None:
    def shard(stream: int) -> None:
        info: Any = get_worker_info()
        info.dataset.begin += 5 * stream + 1

    where = StreamHost(
        lambda: parts(Counting(20), is_iterable=True, batch_size=1, worker_init_fn=shard), where="here", node=""
    )
    for epoch in range(2):
        where.open(opened(1, epoch=epoch))
        assert values(fetch(where, 1))[0][0] == 6
    where.open(opened(0))
    assert values(fetch(where, 0))[0][0] == 1


def test_what_user_code_raises_says_where() -> None:
    class Bad:
        def __getitem__(self, key: int) -> int:
            return {0: 0, 1: 1}[key]

    where = host(Bad())
    where.open(opened(0))
    reply = where.fetch(FetchBatch("key", 0, 4, [0, 1, 2]))
    assert isinstance(reply, FetchFailure)
    error = reply.error()
    assert isinstance(error, KeyError)
    assert isinstance(error, RemoteError)
    (note,) = error.__notes__
    assert note.startswith("batch 4, sample 2, of the dataset raised KeyError in worker here on node n1:")
    assert "return {0: 0, 1: 1}[key]" in note
    assert "unified/loader" not in note, "frames of ours say nothing to the user"
    assert values(fetch(where, 0, [1])) == [1], "the next batch is none the worse"


def test_a_dataset_that_cannot_start_fails_every_fetch_until_it_is_opened_again() -> None:
    broken = [True]

    def load() -> LoaderParts:
        if broken:
            raise FileNotFoundError("data.bin")
        return parts(Draws())

    where = StreamHost(load, where="here")
    where.open(opened(0))
    for _ in range(2):
        reply = fetch(where, 0, [0])
        assert isinstance(reply, FetchFailure)
        assert isinstance(reply.error(), FileNotFoundError)
    broken.clear()
    where.open(opened(0))
    assert values(fetch(where, 0, [0]))[0][0] == 0


def test_a_stream_nobody_opened_is_lost() -> None:
    with pytest.raises(StreamLostError, match="stream 3"):
        fetch(host(Draws()), 3, [0])


def test_many_keys_make_no_endless_message() -> None:
    class Whole:
        def __getitems__(self, keys: list[int]) -> list[int]:
            raise OSError("gone")

    where = host(Whole())
    where.open(opened(0))
    reply = fetch(where, 0, list(range(1000)))
    assert isinstance(reply, FetchFailure)
    assert reply.what == "batch 0, samples [0, 1, 2, 3, 4, 5, ...], of the dataset"
