"""What a pipeline does with items, in the process that has them. Iterators in, iterators out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class Map(NamedTuple):
    function: Callable[[Any], Any]


class Filter(NamedTuple):
    predicate: Callable[[Any], Any]


class FlatMap(NamedTuple):
    function: Callable[[Any], Iterable[Any]]


class Batch(NamedTuple):
    size: int
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None

    def made_of(self, items: list[Any]) -> Any:
        return items if self.collate is None else self.collate(items)


class Shuffle(NamedTuple):
    seed: int
    buffer: int


class Repeat(NamedTuple):
    times: int | None


class Take(NamedTuple):
    number: int


ItemOperator = Map | Filter | FlatMap
"""These look at one item at a time, so that any process can carry them out."""
Operator = ItemOperator | Batch | Shuffle | Repeat | Take
Repetition = tuple[int, ...]
"""Which pass of the `Repeat`s around it, the innermost first; part of a shuffle's seed, so that no two are alike."""


def apply(operators: Sequence[ItemOperator], item: Any) -> list[Any]:
    """What becomes of one item: nothing, one item, or several."""
    items = [item]
    for operator in operators:
        match operator:
            case Map(function):
                items = [function(each) for each in items]
            case Filter(predicate):
                items = [each for each in items if predicate(each)]
            case FlatMap(function):
                items = [made for each in items for made in function(each)]
    return items


def in_batches(items: Iterator[Any], batch: Batch) -> Iterator[Any]:
    """Lists of `size` items; the last one may be shorter, unless it is dropped."""
    while chunk := list(itertools.islice(items, batch.size)):
        if len(chunk) < batch.size and batch.drop_last:
            return
        yield batch.made_of(chunk)


def shuffled(items: Iterator[Any], shuffle: Shuffle, repetition: Repetition) -> Iterator[Any]:
    """Each item is drawn at random from a buffer that is kept full; with room for all of them, a true permutation."""
    generator = random.Random(f"{shuffle.seed} {repetition}")
    buffer = list(itertools.islice(items, shuffle.buffer))
    for item in items:
        chosen = generator.randrange(len(buffer))
        buffer[chosen], item = item, buffer[chosen]
        yield item
    generator.shuffle(buffer)
    yield from buffer


def permuted(number: int, shuffle: Shuffle, repetition: Repetition) -> Iterator[int]:
    """The numbers from 0 in random order: shuffles a source with a length without touching what is in it."""
    numbers = list(range(number))
    random.Random(f"{shuffle.seed} {repetition}").shuffle(numbers)
    return iter(numbers)
