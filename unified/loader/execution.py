"""The execution of a `Dataset`: which operators are carried out here, and which in other processes.

Operators on one item at a time (map, filter, flat_map) run in workers, chunk by chunk, as *stages*. The others need all
items in order, and run here. If a batch is made of exactly one chunk, the worker makes it, too. Workers look up a
source with an index: operators before that handle only numbers.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from unified.loader.epoch import Epoch, EpochSettings
from unified.loader.iterator import choose_workers, unwrap
from unified.loader.messages import LoaderWorkers
from unified.loader.stream_host import LoaderParts

CHUNK = 16
"""Items that go to a worker at once, unless a batch sets their number."""


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
"""Operators on one item at a time, which any process can carry out."""
Operator = ItemOperator | Batch | Shuffle | Repeat | Take
Repetition = tuple[int, ...]
"""The pass number of each enclosing `Repeat`, outermost first: part of a shuffle's seed, so that passes differ."""


def apply(operators: Sequence[ItemOperator], item: Any) -> list[Any]:
    """Return the results of the operators for one item: none, one or several."""
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
    """Yield lists of `size` items; the last one may be shorter, unless it is dropped."""
    while chunk := list(itertools.islice(items, batch.size)):
        if len(chunk) < batch.size and batch.drop_last:
            return
        yield batch.made_of(chunk)


def shuffled(items: Iterator[Any], shuffle: Shuffle, repetition: Repetition) -> Iterator[Any]:
    """Yield items drawn at random from a buffer that is kept full; a true permutation if all items fit."""
    generator = random.Random(f"{shuffle.seed} {repetition}")
    buffer = list(itertools.islice(items, shuffle.buffer))
    for item in items:
        chosen = generator.randrange(len(buffer))
        buffer[chosen], item = item, buffer[chosen]
        yield item
    generator.shuffle(buffer)
    yield from buffer


def permuted(number: int, shuffle: Shuffle, repetition: Repetition) -> Iterator[int]:
    """Yield the numbers from 0 in random order, to shuffle a source with a length without reading it."""
    numbers = list(range(number))
    random.Random(f"{shuffle.seed} {repetition}").shuffle(numbers)
    return iter(numbers)


class Spread(NamedTuple):
    """The options of a pipeline that is spread over processes."""

    num_workers: int | None
    chunk: int | None
    depth: int
    role: str | None
    local: bool


Node = Callable[[Repetition], Iterator[Any]]
"""A function that yields the items of one pass."""


class PipelineRun:
    """One iteration over a dataset: a chain of nodes, and the processes behind some of them."""

    def __init__(self, source: Any, operators: Sequence[Operator], spread: Spread | None) -> None:
        self._stages: list[_OperatorStage] = []
        self._node = self._built(source, list(operators), spread)

    def items(self) -> Iterator[Any]:
        return self._node(())

    def close(self) -> None:
        for stage in self._stages:
            stage.close()

    def _built(self, source: Any, rest: list[Operator], spread: Spread | None) -> Node:
        """Chain sequential operators here, and runs of others as stages. The first stage looks up a source with an
        index; operators before it handle only numbers."""
        is_indexed = has_index(source)
        shuffle = rest.pop(0) if is_indexed and rest and isinstance(rest[0], Shuffle) else None
        node: Node = _keys_of(source, shuffle) if is_indexed else _items_of(source)
        while rest:
            if isinstance(rest[0], ItemOperator) or (is_indexed and _is_batch_of_source(rest)):
                first, batch, then = _cut_stage(rest)
                node = self._stage(node, source if is_indexed else None, first, batch, then, spread)
                is_indexed = False
            elif isinstance(rest[0], Batch) and is_indexed:
                node, is_indexed = _looked_up(node, source), False
            else:
                node = _sequential(node, rest.pop(0))
        return _looked_up(node, source) if is_indexed else node

    def _stage(
        self,
        node: Node,
        source: Any,
        first: list[ItemOperator],
        batch: Batch | None,
        then: list[ItemOperator],
        spread: Spread | None,
    ) -> Node:
        reader, finisher = _Reader(source, first), _Finisher(batch, then)
        if spread is None:
            size = 1 if batch is None else batch.size
            return lambda repetition: _done_here(node(repetition), reader, finisher, size)
        is_uneven = any(isinstance(operator, FlatMap) for operator in first)
        size = batch.size if batch is not None else spread.chunk or (1 if is_uneven else CHUNK)
        stage = _OperatorStage(reader, finisher, size, spread)
        self._stages.append(stage)
        return lambda repetition: stage.items(node(repetition))


@dataclass(frozen=True, eq=False)
class _Reader:
    """A worker's work on one key: a look-up, if there is a source, and the operators."""

    source: Any
    operators: list[ItemOperator]

    def __getitem__(self, key: Any) -> list[Any]:
        return apply(self.operators, key if self.source is None else self.source[key])


@dataclass(frozen=True, eq=False)
class _Finisher:
    """A worker's work on a chunk: a batch of it, if `batch` is set, and the operators after that."""

    batch: Batch | None
    operators: list[ItemOperator]

    def __call__(self, read: list[list[Any]]) -> list[Any]:
        items = [item for each in read for item in each]
        if self.batch is not None:
            if len(items) < self.batch.size and self.batch.drop_last:
                return []
            items = [self.batch.made_of(items)]
        return [made for item in items for made in apply(self.operators, item)]


class _OperatorStage:
    """A run of operators in other processes, which stay from one pass to the next."""

    def __init__(self, reader: _Reader, finisher: _Finisher, size: int, spread: Spread) -> None:
        self._parts = LoaderParts(dataset=reader, collate_fn=finisher, has_batches=True, name="a Dataset")
        self._size = size
        self._spread = spread
        self._key = uuid.uuid4().hex
        self._workers: LoaderWorkers | None = None
        self._num_passes = 0
        self._num_streams = 0

    def items(self, keys: Iterator[Any]) -> Iterator[Any]:
        if self._workers is None:
            self._workers, self._num_streams = choose_workers(
                self._parts, self._key, self._spread.num_workers or 0, role=self._spread.role, local=self._spread.local
            )
        number, self._num_passes = self._num_passes, self._num_passes + 1
        chunks = iter(lambda: list(itertools.islice(keys, self._size)), [])
        settings = EpochSettings(num_streams=self._num_streams, depth=max(1, self._spread.depth))
        epoch = Epoch(self._workers, self._key, chunks, settings, base_seed=number, number=number, unwrap=unwrap)
        try:
            while True:
                try:
                    chunk = epoch.take()
                except StopIteration:
                    return
                yield from chunk
        finally:
            epoch.close()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


def _cut_stage(rest: list[Operator]) -> tuple[list[ItemOperator], Batch | None, list[ItemOperator]]:
    """Take the operators of one stage off the front: item operators, and perhaps a batch and item operators after it.
    A batch is taken only after `Map` operators alone, so that a chunk of its size makes exactly one batch."""
    first = _take_while_items(rest)
    if not all(isinstance(operator, Map) for operator in first) or not rest or not isinstance(rest[0], Batch):
        return first, None, []
    batch = cast(Batch, rest.pop(0))
    return first, batch, _take_while_items(rest)


def _is_batch_of_source(rest: list[Operator]) -> bool:
    """Return whether a batch of the source itself comes first, and an item operator after it."""
    return isinstance(rest[0], Batch) and len(rest) > 1 and isinstance(rest[1], ItemOperator)


def _take_while_items(rest: list[Operator]) -> list[ItemOperator]:
    taken: list[ItemOperator] = []
    while rest and isinstance(rest[0], ItemOperator):
        taken.append(cast(ItemOperator, rest.pop(0)))
    return taken


def _done_here(keys: Iterator[Any], reader: _Reader, finisher: _Finisher, size: int) -> Iterator[Any]:
    while chunk := list(itertools.islice(keys, size)):
        yield from finisher([reader[key] for key in chunk])


def _sequential(node: Node, operator: Operator) -> Node:
    match operator:
        case Batch():
            return lambda repetition: in_batches(node(repetition), operator)
        case Shuffle():
            return lambda repetition: shuffled(node(repetition), operator, repetition)
        case Repeat(times):
            return lambda repetition: _repeated(node, times, repetition)
        case Take(number):
            return lambda repetition: itertools.islice(node(repetition), number)
    raise AssertionError(f"{operator} is no sequential operator")


def _repeated(node: Node, times: int | None, repetition: Repetition) -> Iterator[Any]:
    for number in itertools.count() if times is None else range(times):
        is_empty = True
        for item in node((*repetition, number)):
            is_empty = False
            yield item
        if is_empty:  # else an endless repeat would never yield
            return


def has_index(source: Any) -> bool:
    return isinstance(source, Sized) and hasattr(source, "__getitem__") and not isinstance(source, dict | set | str)


def _keys_of(source: Any, shuffle: Any) -> Node:
    if shuffle is None:
        return lambda repetition: iter(range(len(source)))
    return lambda repetition: permuted(len(source), shuffle, repetition)


def _items_of(source: Any) -> Node:
    return lambda repetition: iter(source() if callable(source) else source)


def _looked_up(node: Node, source: Any) -> Node:
    return lambda repetition: (source[number] for number in node(repetition))
