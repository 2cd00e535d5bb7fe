"""The watch on exceptions that the main thread handles in a collective: when it tells, and how often."""

import pytest

from unified.worker.cleanup_watch import EVERY_S, CleanupWatch


class Rank:
    """A rank whose collective the test says."""

    def __init__(self) -> None:
        self.collective = ""
        self.told: list[str] = []
        self.watch = CleanupWatch(lambda: self.collective, self.told.append)

    def look(self, collective: str) -> list[str]:
        """Let the watch look once, and return what it has told by then."""
        self.collective = collective
        self.watch._look()
        return self.told


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_the_second_look_in_one_collective_tells(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 * EVERY_S < 10, "it is told within ten seconds"
    assert rank.look("all_reduce 2") == rank.look("all_reduce 2") == []
    try:
        raise ValueError("boom")
    except ValueError:
        assert rank.look("") == rank.look("all_reduce 2") == rank.look("all_reduce 3") == []
        (told,) = rank.look("all_reduce 3")
        assert rank.look("all_reduce 3") == [told]
    assert told.startswith("ValueError: boom in test_the_second_look")
    said = capsys.readouterr().err
    assert "this rank has been in all_reduce 3 for 2 s or more while it handles an exception" in said
    assert said.count("ValueError: boom") == 1
    assert rank.look("") == [told, ""]


def test_a_program_that_runs_in_an_except_block_is_told_of_once(rank: Rank) -> None:
    try:
        raise ImportError("no apex")
    except ImportError:
        for number in (1, 2, 3):  # each takes its time, as peers are late
            rank.look(f"all_reduce {number}")
            rank.look(f"all_reduce {number}")
        first, went_on = rank.told
        assert (first.startswith("ImportError: no apex"), went_on) == (True, "")
        try:
            raise ValueError("boom")
        except ValueError:
            rank.look("all_reduce 4")
            rank.look("all_reduce 4")
    assert rank.told[2:] == [rank.told[2]]
    assert rank.told[2].startswith("ValueError: boom")
