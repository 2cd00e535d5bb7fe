"""Payloads that can be checked wherever they arrive, and are checked again after they have lain about for a while."""

import random
import threading
import time
from collections import deque
from typing import Any

import numpy as np

LARGEST = 64 << 20
SHELF_BYTES = 192 << 20
SHELF_S = 2.0


def size(rng: random.Random, largest: int = LARGEST) -> int:
    """Bytes: often nothing or little, sometimes very much."""
    return 0 if rng.random() < 0.1 else round(largest ** rng.random())


def make(nbytes: int, mark: int, kind: str) -> Any:
    """`nbytes` of one byte that says which payload it is.

    Args:
        kind: ``array``, ``tensor`` (inside a dict, as a state_dict has it) or ``bytes``.
    """
    if kind == "bytes":
        return bytes([mark]) * nbytes
    array = np.full(nbytes, mark, np.uint8)
    if kind == "array":
        return array
    import torch

    return {"weight": torch.from_numpy(array), "mark": mark}


def complaint(value: Any, nbytes: int, mark: int) -> str:
    """What is wrong with a payload, or nothing."""
    if isinstance(value, dict):
        value = value["weight"].numpy()
    if isinstance(value, bytes | bytearray | memoryview):
        value = np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.shape != (nbytes,):
        return f"{nbytes} bytes were sent, {type(value).__name__} {getattr(value, 'shape', '')} arrived"
    if nbytes and not (value.min() == mark == value.max()):
        return f"{nbytes} bytes of {mark} were sent, bytes of {value.min()} to {value.max()} arrived"
    return ""


class Shelf:
    """Keeps what arrived for a while: memory that is given to somebody else too early shows here."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Any, int, int]] = deque()
        self._nbytes = 0
        self._lock = threading.Lock()

    def put(self, value: Any, nbytes: int, mark: int) -> str:
        """Keep a payload; returns what is wrong with those that have lain here long enough."""
        now = time.monotonic()
        with self._lock:
            self._kept.append((now, value, nbytes, mark))
            self._nbytes += nbytes
            ripe = []
            while self._kept and (self._nbytes > SHELF_BYTES or self._kept[0][0] < now - SHELF_S):
                ripe.append(self._kept.popleft())
                self._nbytes -= ripe[-1][2]
        found = [complaint(old, size, sign) for _, old, size, sign in ripe]
        return "; ".join(f"after a while: {wrong}" for wrong in found if wrong)
