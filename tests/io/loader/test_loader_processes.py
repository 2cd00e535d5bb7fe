"""`DataLoaderIter` and `Dataset` with real helper processes, against torch's own workers."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool, _ExecutorManagerThread
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import unified.loader.dataset
from tests.support.deadlines import met, missed
from unified.errors import LoaderError, LoaderTimeoutError, UsageError
from unified.loader.iterator import DataLoaderIter, RayDataLoaderIter, patch_dataloader_ray
from unified.loader.local_workers import _Process
from unified.testing import Belongings, eventually

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings(  # what torch's own loader is told as well, and that 2 cores are few
        "ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
    ),
]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = Belongings()
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # of multiprocessing's spawn; it would stay as long as this process

    def left() -> set[object]:
        now = Belongings()
        descriptors = {each for each in now.descriptors if now.descriptors[each] != before.descriptors.get(each)}
        return (now.threads - before.threads) | (now.children.keys() - before.children.keys()) | descriptors

    eventually(lambda: not left(), message="a loader left threads, processes or descriptors behind")


class Draws(Dataset[dict[str, Any]]):
    """Samples that show everything that torch promises its workers."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> dict[str, Any]:
        info: Any = get_worker_info()
        draws = [random.random(), float(torch.rand(())), float(np.random.rand())]
        return {"key": key, "id": info.id, "seed": info.seed, "of": info.num_workers, "draws": torch.tensor(draws)}


class Pids(Dataset[tuple[int, int]]):
    def __init__(self, size: int = 24, pause_s: float = 0.005) -> None:
        self.size = size
        self.pause_s = pause_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> tuple[int, int]:
        time.sleep(self.pause_s)
        return key, os.getpid()


class Lines(IterableDataset[tuple[int, int, int]]):
    """The stream `i` has ``3 * i + 2`` items."""

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        info: Any = get_worker_info()
        for number in range(3 * info.id + 2):
            yield info.id, number, os.getpid()


def same(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}, {"sampler": [3, 1, 2]}])
def test_batches_are_those_of_torch_bit_by_bit(options: dict[str, Any]) -> None:
    """Over two epochs: order, samples, seeds and random numbers."""

    def loader() -> DataLoader[dict[str, Any]]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Draws(), batch_size=4, num_workers=2, generator=generator, **options)

    reference = loader()
    theirs = [list(reference) for _ in range(2)]
    with DataLoaderIter(loader()) as ours:
        assert len(ours) == len(reference)
        for wanted in theirs:
            assert all(map(same, list(ours), wanted))
            assert next(ours, None) is None, "the epoch is over until it is asked for the next"


def test_batch_sampler_and_no_batches_at_all() -> None:
    batches = [[3, 1], [2], [0, 4, 5]]
    with DataLoaderIter(DataLoader(Draws(), batch_sampler=batches), 2) as ours:
        assert [batch["key"].tolist() for batch in ours] == batches
    with DataLoaderIter(DataLoader(Draws(5), batch_size=None), 2) as ours:
        assert [sample["key"] for sample in ours] == [0, 1, 2, 3, 4]


def test_iterable_dataset_in_the_order_of_torch() -> None:
    theirs = [batch[:2] for batch in DataLoader(Lines(), batch_size=2, num_workers=2)]
    with DataLoaderIter(DataLoader(Lines(), batch_size=2), 2) as ours:
        for _ in range(2):
            batches = [batch[:2] for batch in ours]
            assert all(torch.equal(torch.stack(a), torch.stack(b)) for a, b in zip(batches, theirs, strict=True))


@pytest.mark.parametrize("dataset", [Pids(), Lines()], ids=["map", "iterable"])
def test_a_killed_helper_is_replaced_and_no_batch_lost_or_doubled(dataset: Dataset[Any]) -> None:
    with DataLoaderIter(DataLoader(dataset, batch_size=2), 2) as whole:
        wanted = [batch[:-1] for batch in whole]
    with DataLoaderIter(DataLoader(dataset, batch_size=2), 2) as ours:
        batches = [next(ours), next(ours)]
        for batch in batches:
            os.kill(int(batch[-1][0]), signal.SIGKILL)
        batches += ours
    assert str([batch[:-1] for batch in batches]) == str(wanted)
    assert len({int(pid) for batch in batches for pid in batch[-1]}) > 2


class Poison(Pids):
    def __getitem__(self, key: int) -> tuple[int, int]:
        if key == 5:
            time.sleep(1)  # tensors are sent as descriptors, which the parent fetches from a living process
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def test_a_batch_that_kills_its_helper_is_given_up() -> None:
    with DataLoaderIter(DataLoader(Poison(), batch_size=2), 2, max_retries=1) as ours:
        with pytest.raises(LoaderError, match=r"batch 2 was lost 2 times.*helper 0 of process \d+ \(pid \d+\)"):
            list(ours)
        with pytest.raises(LoaderError):  # and not an end as if all were well
            next(ours)


class Bad(Pids):
    def __getitem__(self, key: int) -> tuple[int, int]:
        if key == 5:
            raise FileNotFoundError(2, "no such sample", f"{key}.png")
        return super().__getitem__(key)


def test_an_exception_says_which_sample_and_iteration_can_go_on() -> None:
    with DataLoaderIter(DataLoader(Bad(8), batch_size=2), 2) as ours:
        assert next(ours)[0].tolist() == [0, 1]
        assert next(ours)[0].tolist() == [2, 3]
        with pytest.raises(FileNotFoundError) as caught:
            next(ours)
        assert caught.value.filename == "5.png"
        assert (
            "batch 2, sample 5, of dataset Bad raised FileNotFoundError in worker helper 0" in caught.value.__notes__[0]
        )
        assert "raise FileNotFoundError" in caught.value.__notes__[0]
        assert next(ours)[0].tolist() == [6, 7]


def test_timeout() -> None:
    loader = DataLoader(Pids(2, pause_s=0.5), num_workers=1, timeout=missed(0.1))
    with DataLoaderIter(loader) as ours, pytest.raises(LoaderTimeoutError, match=r"within 0\.1 s"):
        next(ours)


def test_what_a_sampler_raises_comes_after_the_batches_before_it() -> None:
    class Keys:
        def __iter__(self) -> Iterator[int]:
            yield from (0, 1, 2)
            raise KeyError("sampler")

    with DataLoaderIter(DataLoader(Pids(), sampler=Keys()), 2) as ours:
        assert [next(ours)[0].item() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError, match="sampler"):
            next(ours)


@pytest.mark.parametrize("method", ["spawn"])
@pytest.mark.slow
def test_other_start_methods_take_lambdas_and_local_classes(method: str) -> None:
    class Local(Pids):
        pass

    loader = DataLoader(
        Local(6),
        batch_size=2,
        num_workers=1,
        collate_fn=lambda pairs: [key for key, _ in pairs],
        multiprocessing_context=method,
    )
    with DataLoaderIter(loader) as ours:
        assert list(ours) == [[0, 1], [2, 3], [4, 5]]


def test_iterator_of_document_three() -> None:
    dataloader = DataLoader(Pids(8), batch_size=2)
    iterator = RayDataLoaderIter(dataloader, num_actors=4)
    keys = []
    for batch in iterator:
        keys += batch[0].tolist()
    assert keys == list(range(8))
    iterator.close()


def test_patch_and_undo() -> None:
    original = DataLoader._get_iterator
    loader = DataLoader(Draws(), batch_size=4, num_workers=2, generator=torch.Generator().manual_seed(1))
    wanted = list(loader)
    loader.generator.manual_seed(1)
    with patch_dataloader_ray():
        iterator = iter(loader)
        assert isinstance(iterator, DataLoaderIter)
        assert all(map(same, list(iterator), wanted))
        patch_dataloader_ray()  # twice is once
    assert DataLoader._get_iterator is original


class PidsThroughALoader(Dataset[int]):
    """Reads each item with a loader of its own, and says in which process that one reads."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: int) -> int:
        (batch,) = DataLoader(Pids(1))
        return int(batch[1])


def test_patch_serves_loaders_without_workers_too() -> None:
    loader = DataLoader(Pids(4), batch_size=2)
    with patch_dataloader_ray():
        assert isinstance(iter(loader), DataLoaderIter)
        keys, pids = zip(*loader, strict=True)
        assert [key for batch in keys for key in batch.tolist()] == [0, 1, 2, 3]
        assert os.getpid() not in {int(pid) for batch in pids for pid in batch}
        within = {int(pid) for batch in DataLoader(PidsThroughALoader()) for pid in batch}
        assert len(within) == 1, "a loader within a dataset reads where that is read, in one process"
    with patch_dataloader_ray(leave_single_process=True):
        assert not isinstance(iter(loader), DataLoaderIter)
        assert {int(pid) for batch in loader for pid in batch[1]} == {os.getpid()}
        assert isinstance(iter(DataLoader(Pids(1), num_workers=1)), DataLoaderIter)


def test_patched_loader_with_persistent_workers_keeps_its_processes() -> None:
    loader = DataLoader(Pids(8), batch_size=2, num_workers=2, persistent_workers=True)
    with patch_dataloader_ray():
        epochs = [[int(pid) for batch in loader for pid in batch[1]] for _ in range(2)]
        assert next(iter(loader))[0].tolist() == [0, 1]
        assert next(iter(loader))[0].tolist() == [0, 1], "each iter() begins anew, wherever the last one was"
    assert set(epochs[0]) == set(epochs[1])
    loader._iterator.close()  # type: ignore[union-attr]


def test_restart_and_close() -> None:
    ours = DataLoaderIter(DataLoader(Pids(8), batch_size=2), 1)
    assert next(ours)[0].tolist() == [0, 1]
    ours.restart()
    assert next(ours)[0].tolist() == [0, 1]
    ours.close()
    ours.close()
    assert list(ours) == []


def test_mistakes_are_told_at_once() -> None:
    loader = DataLoader(Pids())
    with pytest.raises(UsageError, match="from 1 up, not 0"):
        DataLoaderIter(loader, 0)
    with pytest.raises(UsageError, match="role 'loader' cannot load data here"):
        DataLoaderIter(loader, role="loader")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_batches_are_pinned() -> None:
    with DataLoaderIter(DataLoader(Draws(), batch_size=4, pin_memory=True), 2) as ours:
        assert all(batch["draws"].is_pinned() for batch in ours)


def test_pinning_happens_on_a_thread_of_its_own_and_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above shows on a GPU, as far as it goes without one."""
    threads: set[str] = set()

    def pin(batch: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        return {**batch, "is_pinned": True}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", pin)
    with DataLoaderIter(DataLoader(Draws(8), batch_size=2, pin_memory=True), 2) as ours:
        batches = list(ours)
    assert [batch["key"].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(batch["is_pinned"] for batch in batches)
    assert threads == {"loader-pin_0"}


def test_a_pipeline_spread_over_processes_yields_the_same() -> None:
    data = unified.loader.dataset.Dataset(range(100)).shuffle(3)
    for chain in (
        data.map(lambda x: x + 1).filter(lambda x: x % 3).batch(7).map(sum),
        data.map(lambda x: [x]).batch(8, drop_last=True),
        data.take(9).repeat(2).flat_map(lambda x: [x, -x]),
    ):
        assert list(chain.spread(2, local=True)) == list(chain)
    pids = set(unified.loader.dataset.Dataset(range(64)).map(lambda _: os.getpid()).spread(2, local=True))
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_pipeline_that_is_left_early_lets_its_processes_go() -> None:
    threads = threading.active_count()
    numbers = unified.loader.dataset.Dataset(range(100)).map(lambda x: x).repeat().spread(1, local=True)
    assert [number for number, _ in zip(numbers, range(3), strict=False)] == [0, 1, 2]
    assert threading.active_count() == threads


def test_rows_of_files(tmp_path: Any) -> None:
    pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"n": n, "text": str(n)} for n in range(300)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=50)
    from_files = unified.loader.dataset.Dataset.from_files
    assert list(from_files(str(tmp_path / "rows.parquet")).spread(2, local=True)) == rows
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    assert list(from_files([str(tmp_path / "rows.jsonl")])) == [{"n": 1}, {"n": 2}]
    with pytest.raises(UsageError, match="no column 'm'; they have n, text"):
        from_files(str(tmp_path / "rows.parquet"), columns=["m"])


def test_a_lost_helper_leaves_nothing_while_what_it_was_asked_still_fails() -> None:
    """An executor fails it one by one, and its thread ended in the middle if one was cancelled then."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        helper = _Process(multiprocessing.get_context("fork"), None, "helper")
        pid = helper.submit(os.getpid).result()
        asked = [helper.submit(partial(time.sleep, 600)) for _ in range(3000)]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            asked[0].result()
        assert helper.close(is_lost=True) == pid
        assert all(isinstance(future.exception(), BrokenProcessPool) for future in asked)
    finally:
        sys.setswitchinterval(interval)


def test_a_helper_that_is_closed_before_it_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor has passed on no request yet; then all of them can be cancelled."""
    cancelled = threading.Event()
    pass_on = _ExecutorManagerThread.add_call_item_to_queue

    def pass_on_late(self: Any) -> None:
        assert cancelled.wait(met(100))
        pass_on(self)

    def wait_and_tell(*args: Any) -> Any:
        cancelled.set()
        return wait(*args)

    monkeypatch.setattr(_ExecutorManagerThread, "add_call_item_to_queue", pass_on_late)
    monkeypatch.setattr("unified.loader.local_workers.wait", wait_and_tell)
    helper = _Process(multiprocessing.get_context("fork"), None, "helper")
    asked = helper.submit(partial(time.sleep, 600))
    pid = helper.close()
    assert asked.cancelled()
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()
