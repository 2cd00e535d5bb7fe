"""Deadlines in tests: one that has to be met is long; a short one says that it is meant to pass, by `missed(0.1)`.

What runs a dozen times as slowly on a busy machine passes all the same: it waits for events, and fails only if hung.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.deadlines import LEAST_S, met, missed

ROOT = Path(__file__).parents[2]
FOLDERS = ["browser", "cluster", "io", "kubernetes", "monitoring", "slurm", "support", "systemd", "training"]
"""Folders of tests of what takes time. Others use a clock of their own, or none."""
PROGRAMS = ROOT / "tests/support/programs"
PARAMETERS = {
    "timeout", "_timeout", "timeout_s", "within", "within_s", "call_timeout_s", "deadline_s", "grace_s",
    "heartbeat_timeout_s", "owner_timeout",
}  # fmt: skip
POSITIONS = {"communicate": 1, "eventually": 1, "join": 0, "result": 0, "exception": 0, "wait": 0, "wait_for": 1}
"""Functions that wait, and which of their arguments is the deadline."""
CLOCKS = {"time.monotonic()", "time.perf_counter()", "time.time()"}
ALLOWED = {
    # Seconds of silence after which a worker is lost. It has to be heard once before, and the test waits for its loss.
    "tests/io/data/test_data_epoch_end.py: TrainingOrchestrator(heartbeat_timeout_s=3)",
    # The promise itself: all nodes are free ten seconds after the end of a job.
    "tests/slurm/test_slurm_jobs.py: time.monotonic() - ended_at < 10",
    # The text of the error says which workers have not answered by then: others have to have answered.
    "tests/io/weights/test_weights_reading.py: send(timeout=3)",
    "tests/io/weights/test_weights_transfer.py: send(timeout=3)",
}
"""Deadlines that both have to be met by somebody and pass in the end. Entries may go, never come."""


def number_of(node: ast.expr, constants: Mapping[str, ast.expr]) -> float | None:
    """Return the number that is written there, or in a constant, unless it is 0, which asks without waiting."""
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value) or None
    return None


def constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    """Return what names of the module stand for."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def short_deadlines(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and words of deadlines that are too short to be met on a busy machine, and are not marked."""
    tree = ast.parse(text)
    constants = constants_of(tree)
    # `while not stop.wait(0.01)` is a pace, and no deadline.
    paces = {id(call) for loop in ast.walk(tree) if isinstance(loop, ast.While) for call in ast.walk(loop.test)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in paces:
            name = ast.unparse(node.func).rpartition(".")[2]
            given = {each.arg: each.value for each in node.keywords if each.arg in PARAMETERS}
            place = POSITIONS.get(name)
            num_more = -1 if place is None else len(node.args) - place - 1
            if not given and place is not None and (num_more == 0 or (num_more > 0 and name == "eventually")):
                given["timeout"] = node.args[place]
            for parameter, value in given.items():
                seconds = number_of(value, constants)
                if seconds is not None and seconds < LEAST_S:
                    yield node.lineno, f"{name}({parameter}={seconds:g})"
        elif isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.Lt | ast.LtE):
            seconds, left = number_of(node.comparators[-1], constants), [node.left, *node.comparators][-2]
            is_time = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Sub) and ast.unparse(left.left) in CLOCKS
            if seconds is not None and seconds < LEAST_S and is_time:
                yield node.lineno, ast.unparse(node)


def test_a_short_deadline_that_has_to_be_met_is_refused() -> None:
    assert (met(100.0), missed(0.1)) == (100.0, 0.1)
    with pytest.raises(ValueError, match="a busy machine may miss a deadline of 5 s: make it 100 s at least"):
        met(5.0)


def test_what_is_found() -> None:
    found = [
        "future.result(0.1)",
        "thread.join(2)",
        "eventually(lambda: done, 5)",
        "eventually(is_done, timeout=5.0)",
        "eventually(is_done, 5, 'it is not done')",
        "bus.call('b', 'm', (), {}, timeout=0.1).result(100)",
        "assert 0.1 <= time.monotonic() - began < 5",
        "WITHIN_S = 5\nfuture.result(WITHIN_S)",
    ]
    left_alone = [
        "future.result(missed(0.1))",
        "future.result(0)",
        "','.join(names)",
        "queue.get(5)",
        "while not stop.wait(0.01): pass",
        "eventually(lambda: done, 100)",
        "assert time.monotonic() - began >= 0.1",
        "assert number < 5",
    ]
    assert [len(list(short_deadlines(each))) for each in found] == [1] * len(found)
    assert [words for each in left_alone for words in short_deadlines(each)] == []


def test_no_test_needs_a_quick_machine() -> None:
    found = [
        (f"{file.relative_to(ROOT)}: {words}", line)
        for folder in FOLDERS
        for file in sorted((ROOT / "tests" / folder).rglob("*.py"))
        if PROGRAMS not in file.parents
        for line, words in short_deadlines(file.read_text())
    ]
    advice = f"await the event for {LEAST_S:g} s at least, or write missed(…) (tests/support/deadlines.py)"
    new = [f"{where} in line {line}" for where, line in found if where not in ALLOWED]
    assert not new, "\n".join([advice, *new])
    gone = ALLOWED - {where for where, _ in found}
    assert not gone, f"take out of ALLOWED: {gone}"
