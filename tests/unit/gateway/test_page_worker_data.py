"""Logs, curves and stacks as the page shows them: nothing in them does more than to be read."""

import pytest

from tests.support.fake_master import worker_status
from tests.support.page import changes, job
from unified.client.mirror import ClusterMirror
from unified.client.reports import KeptReports
from unified.errors import RefusedError
from unified.protocol.client_master import JobStacks, LogChunk
from unified.protocol.records import LOG_TIME, WorkerReport
from unified.protocol.stacks import StackReport, ThreadStack, WorkerStacks
from unified_gateway.page.worker_data import MAX_LINE, MAX_POINTS, curves, find_worker, log_part, log_text, stacks


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"step 1\nstep 2\n", "step 1\nstep 2\n"),
        (b"\x1b[1;31mred\x1b[0m\tx", "\x1b[1;31mred\x1b[0m\tx"),
        (b"<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
        (b"\x1b]8;;javascript:alert(1)\x07here\x1b]8;;\x07", r"\x1b]8;;javascript:alert(1)\x07here\x1b]8;;\x07"),
        (b"\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        ("a\u202egnp.exe\u2066\u200f".encode(), r"a\u202egnp.exe\u2066\u200f"),
        (b"NUL \x00 BEL \x07 BS \x08", r"NUL \x00 BEL \x07 BS \x08"),
        (b" 10%\r 50%\r100%\r\nnext", "100%\nnext"),
        (b"\xff\xfe\xc3(", "\ufffd\ufffd\ufffd("),
        ("\u0085\u2028é".encode(), "\\x85\u2028é"),
    ],
)
def test_what_was_printed_is_shown_and_colours_alone_are_obeyed(printed: bytes, shown: str) -> None:
    assert log_text(printed) == shown


def test_a_long_line_is_cut_with_a_mark() -> None:
    cut, after = log_text(b"x" * (10 * MAX_LINE) + b"\nnext").split("\n")
    assert cut.endswith(f"x … {9 * MAX_LINE} more characters")
    assert after == "next"


def chunk(data: bytes, offset: int = 0, *, size: int | None = None, is_final: bool = False) -> LogChunk:
    end = offset + len(data)
    return LogChunk(
        worker="w", incarnation=0, data=data, offset=offset, next_offset=end, size=end if size is None else size,
        is_final=is_final,
    )  # fmt: skip


def test_a_part_of_a_log_ends_with_a_whole_line_and_a_tail_begins_with_one() -> None:
    part = log_part(chunk(b"one\ntwo\nthr", 100))
    assert (part["text"], part["offset"], part["next_offset"]) == ("one\ntwo\n", 100, 108)
    tail = log_part(chunk(b"ne\ntwo\nthr", 100), is_tail=True)
    assert (tail["text"], tail["offset"], tail["next_offset"]) == ("two\n", 103, 107)
    assert log_part(chunk(b"one\n"), is_tail=True)["text"] == "one\n"
    last = log_part(chunk(b"one\ntwo", is_final=True))
    assert (last["text"], last["next_offset"], last["is_final"]) == ("one\ntwo", 7, True)


def test_a_line_has_the_time_at_which_its_end_was_written() -> None:
    times = b"".join(LOG_TIME.pack(offset, at) for offset, at in [(90, 1.5), (102, 2.5), (108, 3.25), (114, 4.0)])
    part = log_part(chunk(b"one\ntwo\nthree\nfo", 100), times=times)
    assert part["times"] == [(0, 1.5), (0, 2.5), (2, 3.25), (3, 4.0)]  # one and two, three, what follows
    tail = log_part(chunk(b"ne\ntwo\nthree\n", 101), times=times[:-1], is_tail=True)
    assert (tail["text"], tail["times"]) == ("two\nthree\n", [(0, 1.5), (0, 2.5), (1, 3.25)])
    older = log_part(chunk(b"\nold\none\n", 84), times=times)  # than the index
    assert older["times"][:2] == [(0, 1.5), (3, 2.5)]
    assert log_part(chunk(b"one\n"))["times"] == []


def test_a_prompt_is_shown_though_its_line_has_no_end_and_no_character_is_torn() -> None:
    assert log_part(chunk(b"(Pdb) "))["text"] == "(Pdb) "
    torn = log_part(chunk("größe €".encode()[:-1]))
    assert (torn["text"], torn["next_offset"]) == ("größe ", 8)
    assert log_part(chunk(b"\xff\xff"))["next_offset"] == 2
    assert log_part(chunk(b"\xe2"))["next_offset"] == 1  # nothing else is there: it is no progress to wait for more
    assert log_part(chunk(b""))["text"] == ""


def report(step: int, **metrics: float | int | str | None) -> WorkerReport:
    return WorkerReport(at=float(step), step=step, total=None, metrics=metrics, number=step)


def test_curves_are_columns_with_gaps_where_nothing_was_told() -> None:
    kept = KeptReports(
        [report(0, loss=2.0, note="x"), report(1, loss=None), report(2, loss=1.0, lr=0.1)], ["n1 is away"]
    )
    assert curves(kept, []) == {
        "names": ["loss", "note", "lr"],
        "step": [0, 1, 2],
        "at": [0.0, 1.0, 2.0],
        "values": {"loss": [2.0, None, 1.0], "note": [None] * 3, "lr": [None, None, 0.1]},
        "num_thinned": 0,
        "missing": ["n1 is away"],
    }
    assert list(curves(kept, ["lr", "unknown"])["values"]) == ["lr"]
    assert curves(KeptReports([], []), [])["step"] == []


def test_many_points_are_thinned_and_the_newest_is_kept() -> None:
    found = curves(KeptReports([report(step, loss=1.0) for step in range(2501)], []), ["loss"])
    assert len(found["step"]) <= MAX_POINTS
    assert (found["step"][-1], found["num_thinned"]) == (2500, 2501 - len(found["step"]))


def test_stacks_are_grouped_and_who_has_none_is_named() -> None:
    thread = [ThreadStack(name="MainThread", stack=0, is_main=True)]
    workers = [
        WorkerStacks(worker=f"trainer_3-{rank}_1-0", incarnation=0, rank=rank, threads=thread if rank < 2 else [],
                     note="" if rank < 2 else "its node is away", source="interpreter" if rank < 2 else "none")
        for rank in range(3)
    ]  # fmt: skip
    found = stacks(JobStacks(job_id="gpt-1", report=StackReport(stacks=["train.py:7 in step"], workers=workers)))
    assert found == {
        "groups": [{"workers": ["trainer-0", "trainer-1"], "state": "MainThread", "frames": ["train.py:7 in step"]}],
        "missing": {"trainer-2": "its node is away"},
        "verdict": "trainer: rank 2 did not answer: its node is away.",
    }


def test_a_worker_is_found_by_both_of_its_names() -> None:
    mirror = ClusterMirror()
    mirror.apply(changes(1, is_whole=True, jobs=[job()], workers=[worker_status(rank) for rank in (1, 0)]))
    assert find_worker(mirror, "gpt-1", "trainer-1").rank == 1
    assert find_worker(mirror, "gpt-1", "trainer_1-1_1-0").rank == 1
    assert find_worker(mirror, "gpt-1", "").rank == 0
    for job_id, word in (("gpt-1", "trainer-7"), ("gpt-2", "trainer-0")):
        with pytest.raises(RefusedError):
            find_worker(mirror, job_id, word)
