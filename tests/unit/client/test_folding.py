"""Equal lines of many workers as one: none is lost, none waits for long, and the order of each worker stays."""

import random
import re

from unified.client.folding import FOLD_S, MAX_LINES, LineFolder, is_wanted
from unified.client.logs import LineView, Output, OutputSource


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_equal_lines_of_many_workers_are_one_with_its_count() -> None:
    clock = Clock()
    folder = LineFolder(clock)
    for rank in range(512):
        folder.add(f"[trainer-{rank}] ", "step 1")
    folder.add("[rollout-3] ", "step 1")
    folder.add("[trainer-7] ", "something else")
    assert folder.take() == []
    clock.now = FOLD_S
    assert folder.take() == ["[rollout 3, trainer 0-511 ×513] step 1", "[trainer-7] something else"]
    assert folder.take() == []


def test_a_line_that_one_worker_says_twice_is_shown_twice() -> None:
    folder = LineFolder(Clock())
    for prefix in ("[w-0] ", "[w-1] ", "[w-0] "):
        folder.add(prefix, "again")
    assert folder.take(is_end=True) == ["[w 0, 1 ×2] again", "[w-0] again"]


def test_the_same_line_after_a_restart_is_another_line() -> None:
    folder = LineFolder(Clock())
    for prefix in ("[w-0] ", "[w-1] ", "[w-0#1] ", "[w-1#1] "):
        folder.add(prefix, "step 1")
    assert folder.take(is_end=True) == ["[w 0, 1 ×2] step 1", "[w#1 0, 1 ×2] step 1"]


def test_a_prefix_that_names_no_rank_is_left_alone() -> None:
    folder = LineFolder(Clock())
    for _ in range(2):
        folder.add("[default0]:", "a line")
    assert folder.take(is_end=True) == ["[default0]:a line"] * 2


def test_no_line_waits_for_longer_than_others_and_order_is_kept() -> None:
    clock, random_ = Clock(), random.Random(7)
    folder = LineFolder(clock)
    said: dict[int, list[str]] = {rank: [] for rank in range(5)}
    shown: dict[int, list[str]] = {rank: [] for rank in range(5)}

    def show(lines: list[str]) -> None:
        for line in lines:
            single = re.match(r"\[w-(\d)\]", line)
            for rank in [single[1]] if single else expanded(line):
                shown[int(rank)].append(line.partition("] ")[2])

    for number in range(3000):
        clock.now += 0.01
        rank, text = random_.randrange(5), f"line {random_.randrange(4)}"
        said[rank].append(text)
        folder.add(f"[w-{rank}] ", text)
        show(folder.take())
        assert sum(map(len, shown.values())) >= number - FOLD_S / 0.01
    show(folder.take(is_end=True))
    assert shown == said


def expanded(line: str) -> list[str]:
    """Ranks of a folded prefix."""
    ranges = line.partition(" ×")[0].removeprefix("[w ").split(", ")
    pairs = [part.partition("-") for part in ranges]
    return [str(rank) for a, _, b in pairs for rank in range(int(a), int(b or a) + 1)]


def test_a_flood_of_different_lines_does_not_pile_up() -> None:
    folder = LineFolder(Clock())
    for number in range(MAX_LINES + 5):
        folder.add("[w-0] ", f"line {number}")
    assert folder.take() == [f"[w-0] line {number}" for number in range(5)]


def test_a_view_that_folds_shows_all_at_its_end() -> None:
    view = LineView()
    view.folder = LineFolder(Clock())
    for rank in range(3):
        view.feed([Output(OutputSource(f"[w-{rank}] ", "out"), "same\nbegun")])
    assert view.due() == []
    assert view.flush() == ["[w 0-2 ×3] same", "[w-0] begun", "[w-1] begun", "[w-2] begun"]
    assert [is_wanted({}), is_wanted({"UNIFIED_FOLD": "0"})] == [True, False]
