"""Copying memory in slices, by several threads."""

import random
import threading

import pytest

from unified.tensors import copy as memory_copy
from unified.tensors.copy import Copy, copy_memory


@pytest.mark.parametrize("num_threads", [0, 1, 2, 9])
def test_every_byte_arrives_and_no_other_is_touched(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    np = pytest.importorskip("numpy")
    monkeypatch.setattr(memory_copy, "SLICE_NBYTES", 64)
    dice = random.Random(3)
    source = np.frombuffer(dice.randbytes(100_000), np.uint8)
    target = np.zeros_like(source)
    wanted = np.zeros_like(source)
    copies, at = [], 0
    for _ in range(40):
        nbytes, gap = dice.choice([0, 1, 63, 64, 65, 1000, 4096]), dice.randrange(1, 50)
        copies.append(Copy(target.ctypes.data + at, source.ctypes.data + at, nbytes))
        wanted[at : at + nbytes] = source[at : at + nbytes]
        at += nbytes + gap
    assert at <= len(source)
    copy_memory(copies, num_threads)
    assert (target == wanted).all()


def test_nothing_to_copy() -> None:
    before = set(threading.enumerate())
    copy_memory([], 4)
    assert set(threading.enumerate()) <= before
