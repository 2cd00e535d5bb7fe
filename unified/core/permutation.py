"""A pseudo-random order of numbers that takes no memory."""

from __future__ import annotations

import random
from collections.abc import Iterator


class Permutation:
    """A pseudo-random order of the numbers below `size`, each once. ``permutation[place]`` is the number at a place.

    It takes no memory: a Feistel network over the smallest even number of bits that holds the numbers, repeated while
    its value is too large (Black and Rogaway, cycle walking).

    Args:
        size: 1 or more.
        seed: of the order, which is the same in each process and version of Python.
    """

    _ROUNDS = 6
    _WORD = (1 << 64) - 1

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._bits) - 1
        draws = random.Random(seed)
        self._keys = [draws.getrandbits(64) for _ in range(self._ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._size))

    def __getitem__(self, place: int) -> int:
        while True:
            left, right = place >> self._bits, place & self._mask
            for key in self._keys:
                mixed = (right ^ key) * 0x9E3779B97F4A7C15 & self._WORD
                mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & self._WORD
                left, right = right, left ^ (mixed >> 64 - self._bits)
            place = left << self._bits | right
            if place < self._size:
                return place
