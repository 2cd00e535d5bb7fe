"""What a `Dataset` yields in this process; spread over others it is the same (test_loader_processes.py)."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.errors import UsageError
from unified.loader.dataset import Dataset
from unified.loader.execution import PipelineRun, Repeat, Spread


def flat(item: Any) -> list[int]:
    """The numbers in nested lists."""
    return [number for each in item for number in flat(each)] if isinstance(item, list) else [item]


OPERATORS: dict[str, tuple[Callable[[Dataset[Any]], Dataset[Any]], Callable[[list[Any]], list[Any]]]] = {
    "map": (lambda data: data.map(lambda x: [x]), lambda items: [[x] for x in items]),
    "filter": (
        lambda data: data.filter(lambda x: sum(flat(x)) % 3),
        lambda items: [x for x in items if sum(flat(x)) % 3],
    ),
    "flat_map": (lambda data: data.flat_map(lambda x: [x, x]), lambda items: [x for x in items for _ in "ab"]),
    "batch": (lambda data: data.batch(3), lambda items: [items[i : i + 3] for i in range(0, len(items), 3)]),
    "drop": (
        lambda data: data.batch(2, drop_last=True, collate=lambda x: [x]),
        lambda items: [[items[i : i + 2]] for i in range(0, len(items) - 1, 2)],
    ),
    "take": (lambda data: data.take(7), lambda items: items[:7]),
    "repeat": (lambda data: data.repeat(2), lambda items: items * 2),
}


@settings(max_examples=200)
@given(st.integers(0, 20), st.lists(st.sampled_from(sorted(OPERATORS)), max_size=6), st.booleans())
def test_any_chain_of_operators_does_what_lists_would(size: int, names: list[str], has_index: bool) -> None:
    data: Dataset[Any] = Dataset(range(size)) if has_index else Dataset(lambda: iter(range(size)))
    wanted: list[Any] = list(range(size))
    for name in names:
        ours, theirs = OPERATORS[name]
        data, wanted = ours(data), theirs(wanted)
    assert list(data) == wanted
    assert list(data) == wanted, "the second time it is the same"


@pytest.mark.parametrize("buffer", [1, 4, 1000])
def test_shuffle_is_a_permutation_that_its_seed_decides(buffer: int) -> None:
    data = Dataset(lambda: iter(range(50))).shuffle(3, buffer)
    assert (sorted(data), list(data)) == (list(range(50)), list(data))
    assert (list(data) == list(range(50))) == (buffer == 1)
    if buffer > 1:
        assert list(data) != list(Dataset(lambda: iter(range(50))).shuffle(4, buffer))


def test_each_repetition_is_shuffled_anew() -> None:
    twice = list(Dataset(range(30)).shuffle(3).repeat(2))
    assert sorted(twice[:30]) == sorted(twice[30:]) == list(range(30))
    assert twice[:30] != twice[30:]


def test_a_source_with_an_index_is_shuffled_without_being_read() -> None:
    read: list[int] = []

    class Source:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, number: int) -> int:
            read.append(number)
            return number

    data: Dataset[int] = Dataset(Source())  # type: ignore[arg-type]  # nothing but a length and an index
    assert len(list(data.shuffle(1).take(3))) == 3
    assert len(read) == 3


def test_nothing_happens_before_it_is_iterated_over_nor_beyond_what_is_taken() -> None:
    seen: list[int] = []

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            seen.append(number)
            yield number

    data = Dataset(numbers).map(lambda x: x + 1).take(3)
    assert seen == []
    assert list(data) == [1, 2, 3]
    assert len(seen) == 3


def test_repeating_nothing_for_ever_ends() -> None:
    assert list(Dataset(range(0)).repeat()) == []
    assert list(Dataset(range(2)).repeat().take(5)) == [0, 1, 0, 1, 0]


def test_methods_leave_the_dataset_as_it_is() -> None:
    base = Dataset(range(4))
    assert list(base.map(str)) == ["0", "1", "2", "3"]
    assert list(base) == [0, 1, 2, 3]
    assert repr(base.map(str).batch(2)) == "Dataset(range).map(…).batch(…)"


def test_batches_of_the_source_travel_as_numbers() -> None:
    """A stage that looks the source up itself, rather than one that is sent what was looked up here."""
    spread = Spread(2, None, 2, None, True)
    (stage,) = PipelineRun(range(10), Dataset(range(10)).batch(4).map(len)._operators, spread)._stages
    assert (stage._parts.dataset[3], stage._size) == ([3], 4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Dataset(iter([1])), "is an iterator, which can be used only once"),
        (lambda: Dataset(3), "cannot read items from a int"),  # type: ignore[arg-type]
        (lambda: Dataset([1]).batch(0), "from 1 up, not 0"),
        (lambda: Dataset([1]).shuffle(buffer=0), "from 1 up, not 0"),
    ],
)
def test_mistakes_are_told_at_once(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_operators_say_what_they_are() -> None:
    assert Dataset([1]).repeat(3)._operators == (Repeat(3),)
