"""``unified top``: its rows, its keys, and what it draws."""

import io
import os

import pytest
from rich.console import Console

from tests.support.fake_master import RESOURCES, worker_status
from tests.unit.client.test_overview import job, mirror, node
from unified.cli.top import KEYS, SORTS, TableView, _pressed, after_key, rows_of, screen
from unified.client.mirror import ClusterMirror
from unified.protocol.client_master import RoleStatus
from unified.protocol.records import Progress, Stage, WorkerState


def cluster() -> ClusterMirror:
    role = RoleStatus(name="trainer", kind="elastic", total=2, is_driver=True)
    made = mirror(
        job(job_id="old-1", submitted_at=1, stage=Stage.STOPPED, exit_code=0, ended_at=5.0),
        job(job_id="b-2", submitted_at=2, roles=[role], reason="all workers run"),
        job(job_id="a-3", submitted_at=3, reason="waits: \x1b[31mno room [bold]here[/data]"),
        nodes=[node("n1", free=RESOURCES), node("n2", drained="a fan")],
    )
    running = worker_status(progress=Progress(step=3, total=10, metrics={"loss": 0.5}))
    ended = worker_status(1, state=WorkerState.EXITED, reason="killed by SIGKILL")
    made.workers["b-2"] = {each.name: each for each in (running, ended)}
    return made


def drawn(
    view: TableView, made: ClusterMirror | None = None, height: int = 30, silent_s: float = 0.0, width: int = 120
) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(screen(made or cluster(), view, height, silent_s))
    return out.getvalue()


def test_jobs_that_have_ended_come_last_whatever_the_order() -> None:
    orders = [rows_of(cluster(), TableView(sort=sort)) for sort in SORTS]
    assert orders == [["a-3", "b-2", "old-1"], ["a-3", "b-2", "old-1"], ["b-2", "a-3", "old-1"]]


def test_keys_choose_open_and_go_back() -> None:
    made, view = cluster(), TableView()
    for key in ("\x1b[B", "\r"):
        view = after_key(view, KEYS[key], rows_of(made, view))
    assert view == TableView("job", "b-2")
    assert rows_of(made, view)[0].startswith("trainer_1-1"), "the one that does not run comes first"
    assert after_key(view, "back", []) == TableView()
    assert after_key(TableView(), "nodes", []) == TableView("nodes")
    assert after_key(TableView("nodes"), "nodes", []) == TableView()
    assert after_key(TableView(row=99), "down", ["a", "b"]).row == 1
    assert after_key(TableView(), "up", ["a", "b"]).row == 0
    assert after_key(TableView(), "open", []) == TableView()
    assert after_key(TableView(sort=SORTS[-1]), "sort", ["a"]).sort == SORTS[0]


def test_what_is_drawn() -> None:
    jobs = drawn(TableView())
    assert "nodes: 1 ALIVE, 1 DRAINED   devices: 1 of 2 held   jobs: 1 FINISHED, 2 RUNNING" in jobs
    assert "trainer step 3/10 loss 0.5" in jobs
    assert "\x1b" not in jobs, "what a job says does nothing to the terminal"
    assert "no room [bold]here[/data]" in jobs, "nor is it taken for markup"
    assert "a fan" in drawn(TableView("nodes"))
    workers = drawn(TableView("job", "b-2"))
    assert workers.index("killed by SIGKILL") < workers.index("3/10")
    assert "this job is not known any more" in drawn(TableView("job", "gone"))
    assert "unified submit" in drawn(TableView(), mirror())
    assert "has not answered for 7.0 s" in drawn(TableView(), silent_s=7.0)


def test_a_narrow_terminal_cuts_progress_and_reasons_before_names() -> None:
    names = [f"pretrain-{size}-3f2a-{number}-fca820f3ef" for number, size in enumerate(["1b", "7b", "70b"], 1)]
    role = RoleStatus(name="trainer", kind="elastic", total=2, is_driver=True)
    made = mirror(*(job(job_id=name, submitted_at=1, roles=[role, role], reason="why " * 20) for name in names))
    progress = Progress(step=3000, total=100000, metrics={"loss": 0.123456, "lr": 0.0001, "tokens_per_s": 123456.0})
    for name in names:
        worker = worker_status(progress=progress)
        made.workers[name] = {worker.name: worker}
    lines = drawn(TableView(), made, width=80).splitlines()
    assert all(any(name in line and "RUNNING" in line for line in lines) for name in names), lines
    assert max(map(len, lines)) <= 80
    assert all(line.rstrip().endswith("…") and "  why wh" in line for line in lines[2:5]), "a part is read"
    assert len(lines) == 6, "a row is one line"


@pytest.mark.parametrize("height", [5, 12, 30])
def test_the_chosen_row_is_in_sight(height: int) -> None:
    made = mirror(*(job(job_id=f"j-{number:03}", submitted_at=number) for number in range(100)))
    for row in (0, 50, 99):
        text = drawn(TableView(row=row), made, height)
        assert f"j-{99 - row:03}" in text
        assert len(text.splitlines()) <= height


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("\x1b[B\x1b[B\x1b[A", ["down", "down", "up"]),
        ("j\x1b", ["down", "back"]),
        ("zs", ["sort"]),
        ("", ["quit"]),  # the terminal was closed
    ],
)
def test_keys_that_come_together_are_told_apart(typed: str, keys: list[str]) -> None:
    read, write = os.pipe()
    with open(read, "rb") as terminal:
        os.write(write, typed.encode())
        os.close(write)
        assert list(_pressed(terminal.fileno(), 0)) == keys
