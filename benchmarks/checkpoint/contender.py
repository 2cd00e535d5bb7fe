"""One contender of `checkpoint.py` in a process of its own, so that nobody meets another's memory."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.bus.work import MIB, rss_mib, say
from benchmarks.checkpoint.work import LOCAL, PEAK, READINGS, STALL, STORE, STORE_PEAK, nbytes_of, state

SMALL_MIB = 1
"""Saved first of all, so that what is imported then is in no figure."""


class Saved(NamedTuple):
    """Seconds from the call on."""

    stall: float
    """Until training may change the tensors."""
    whole: float
    """Until the checkpoint is there."""


class Contender:
    """Saves a state to the disk, and some also to S3."""

    def __init__(self, place: Path, bucket: str) -> None:
        self.place = place
        self.bucket = bucket

    def save(self, tensors: dict[str, torch.Tensor]) -> Saved:
        raise NotImplementedError

    def prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        """Before `send`, outside its time."""

    def send(self, tensors: dict[str, torch.Tensor]) -> float:
        """Seconds until the state is in the store."""
        raise NotImplementedError

    def clear(self) -> None:
        for each in self.place.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        os.sync()

    def clear_store(self) -> None:
        """The same in the store: a server that keeps all in memory is slower each time it needs more of it."""
        import boto3

        client = boto3.client("s3")
        for each in client.list_objects_v2(Bucket=self.bucket).get("Contents", []):
            client.delete_object(Bucket=self.bucket, Key=each["Key"])

    def close(self) -> None:
        """It is not needed any more."""


class Unified(Contender):
    """`CheckpointManager.save`: its own memory, kept from one save to the next."""

    def __init__(self, place: Path, bucket: str) -> None:
        from unified.checkpoint import CheckpointManager

        super().__init__(place, bucket)
        self._steps = count(1)
        self._saved_at = 0.0
        options: dict[str, Any] = {"keep_last_n": None, "on_saved": self._note}
        self._disk = CheckpointManager(place, **options)
        self._store = CheckpointManager(f"s3://{bucket}/ours", **options) if bucket else None

    def save(self, tensors: dict[str, torch.Tensor]) -> Saved:
        return self._timed(self._disk, tensors)

    def send(self, tensors: dict[str, torch.Tensor]) -> float:
        return self._timed(self._store, tensors).whole

    def close(self) -> None:
        self._disk.close()
        if self._store is not None:
            self._store.close()

    def _timed(self, manager: Any, tensors: dict[str, torch.Tensor]) -> Saved:
        began = time.perf_counter()
        manager.save(tensors, next(self._steps))
        stall = time.perf_counter() - began
        manager.wait()
        return Saved(stall, self._saved_at - began)

    def _note(self, manifest: object) -> None:
        """The manifest is there."""
        self._saved_at = time.perf_counter()


class Bare(Contender):
    """The least that must be done: a copy into warm memory; `write` and `fsync`; boto3's own upload in parts."""

    def __init__(self, place: Path, bucket: str) -> None:
        super().__init__(place, bucket)
        self._copies: dict[str, torch.Tensor] = {}
        self._stored = b""
        self._client: Any = None

    def save(self, tensors: dict[str, torch.Tensor]) -> Saved:
        if self._copies.keys() != tensors.keys():
            self._copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        began = time.perf_counter()
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor)
        stall = time.perf_counter() - began
        began = time.perf_counter()
        with open(self.place / "plain", "wb", buffering=0) as file:
            for tensor in self._copies.values():
                view = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
                while len(view):
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        return Saved(stall, time.perf_counter() - began)

    def prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        import boto3

        file = io.BytesIO()
        torch.save(tensors, file)
        self._stored = file.getvalue()
        self._client = boto3.client("s3")

    def send(self, tensors: dict[str, torch.Tensor]) -> float:
        began = time.perf_counter()
        self._client.upload_fileobj(io.BytesIO(self._stored), self.bucket, "plain")
        return time.perf_counter() - began


class Dcp(Contender):
    """``torch.distributed.checkpoint.async_save`` with a stager that is kept, so that its memory is warm as well."""

    def __init__(self, place: Path, bucket: str) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(place, bucket)
        # Neither pinned nor on a stream: there is no GPU here.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(self, tensors: dict[str, torch.Tensor]) -> Saved:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        writer = FileSystemWriter(self.place / "dcp", thread_count=2)
        began = time.perf_counter()
        saving: Any = async_save(tensors, storage_writer=writer, async_stager=self._stager, no_dist=True)
        stall = time.perf_counter() - began
        saving.result()
        return Saved(stall, time.perf_counter() - began)

    def close(self) -> None:
        self._stager.close()


class TorchSave(Contender):
    """``torch.save`` and ``fsync``: training waits for all of it."""

    def save(self, tensors: dict[str, torch.Tensor]) -> Saved:
        began = time.perf_counter()
        with open(self.place / "state.pt", "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        taken = time.perf_counter() - began
        return Saved(taken, taken)


CONTENDERS: dict[str, type[Contender]] = {"unified": Unified, "bare": Bare, "dcp": Dcp, "torch": TorchSave}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--place", type=Path, required=True, help="an empty directory")
    parser.add_argument("--bucket", default="", help="save to S3, where AWS_ENDPOINT_URL_S3 says, instead")
    args = parser.parse_args()
    contender = CONTENDERS[args.name](args.place, args.bucket)
    measure = to_store if args.bucket else to_disk
    for name, value in measure(contender, args.mib):
        say(name, value)
    contender.close()


def to_disk(contender: Contender, mib: int) -> Iterator[tuple[str, float]]:
    contender.save(state(SMALL_MIB))
    contender.clear()
    tensors = state(mib)
    nbytes = nbytes_of(tensors)
    yield PEAK.name, peak_nbytes(lambda: contender.save(tensors)) / nbytes
    contender.clear()
    readings = []
    for _ in range(READINGS["disk"]):
        readings.append(contender.save(tensors))
        contender.clear()
    yield STALL.name, statistics.median(each.stall for each in readings) * 1e3
    yield LOCAL.name, nbytes / statistics.median(each.whole for each in readings) / 1e6


def to_store(contender: Contender, mib: int) -> Iterator[tuple[str, float]]:
    small = state(SMALL_MIB)
    contender.prepare(small)
    contender.send(small)
    contender.clear_store()
    tensors = state(mib)
    nbytes = nbytes_of(tensors)
    contender.prepare(tensors)
    yield STORE_PEAK.name, peak_nbytes(lambda: contender.send(tensors)) / nbytes
    contender.clear_store()
    readings = []
    for _ in range(READINGS["store"]):
        readings.append(contender.send(tensors))
        contender.clear_store()
    yield STORE.name, nbytes / statistics.median(readings) / 1e6


def peak_nbytes(action: Callable[[], object]) -> float:
    """The most resident memory while it runs, less what there was before."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = rss_mib(os.getpid())
    action()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    return (peak - before) * MIB


if __name__ == "__main__":
    main()
