"""Reports of stacks: put together, read from other programs, and grouped."""

import faulthandler
import json
import random
import tempfile
import threading

import pytest

from unified.core.hangs.flight_record import read
from unified.core.hangs.stacks import (
    Thread,
    add_threads,
    group,
    is_runtime,
    merge,
    read_faulthandler,
    read_py_spy,
    users_part,
)
from unified.protocol.stacks import StackReport, WorkerStacks


def report(rank: int, *threads: Thread) -> StackReport:
    return add_threads(WorkerStacks(worker=f"t_512-{rank}_8-{rank % 8}", incarnation=0, rank=rank), threads)


def test_512_equal_stacks_are_one_group_and_are_sent_once() -> None:
    reports = [
        report(
            rank,
            Thread(
                "MainThread",
                ["train.py:3 in run", "torch.py:9 in all_reduce" if rank != 77 else "s.py:1 in save"],
                True,
            ),
            Thread(
                "unified-stop", ["/x/lib/python3.11/threading.py:2 in run", "/x/unified/worker/stop.py:1 in _serve"]
            ),
        )
        for rank in range(512)
    ]
    merged = merge(reports)
    assert len(merged.stacks) == 3
    groups = group(merged)
    assert [len(each.workers) for each in groups] == [511, 1]
    assert [worker.rank for worker in groups[1].workers] == [77]
    assert len(group(merged, with_runtime=True)) == 3


@pytest.mark.parametrize("seed", range(100))
def test_merging_loses_no_stack(seed: int) -> None:
    draw = random.Random(seed)
    given = {
        rank: [
            Thread(f"thread-{number}", draw.choices(["a:1 in f", "b:2 in g", "c:3 in h"], k=draw.randint(0, 3)))
            for number in range(draw.randint(0, 4))
        ]
        for rank in range(draw.randint(0, 6))
    }
    merged = merge([merge([report(rank, *threads)]) for rank, threads in given.items()])
    assert len(set(merged.stacks)) == len(merged.stacks)
    told = {
        worker.rank: [(thread.name, merged.stacks[thread.stack].splitlines()) for thread in worker.threads]
        for worker in merged.workers
    }
    assert told == {rank: [(thread.name, list(thread.frames)) for thread in threads] for rank, threads in given.items()}
    in_groups = {
        (worker.rank, tuple(each.frames)) for each in group(merged, with_runtime=True) for worker in each.workers
    }
    assert in_groups == {(rank, tuple(thread.frames)) for rank, threads in given.items() for thread in threads}


def test_what_faulthandler_writes_is_read() -> None:
    """The real one, with a thread that waits."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    go_on.set()
    thread.join()
    threads = read_faulthandler(text)
    assert len(threads) >= 2
    assert [thread.is_main for thread in threads] == [False] * (len(threads) - 1) + [True]
    own = threads[-1]
    assert own.name == "MainThread"
    assert own.frames[-1].endswith(" in test_what_faulthandler_writes_is_read")
    assert any(thread.frames[-1].endswith("in wait") for thread in threads[:-1])


def test_threads_have_names_since_python_3_14() -> None:
    text = """
Thread 0x00007f [reader] (most recent call first):
  File "a b.py", line 3 in f
  File "m.py", line ??? in <module>

Thread 0x01 [loader] (most recent call first):
  <no Python frame>
"""
    assert read_faulthandler(text) == [
        Thread("reader", ["m.py:??? in <module>", "a b.py:3 in f"], False),
        Thread("MainThread", [], True),
    ]
    assert read_faulthandler("nonsense\n") == []


def test_what_py_spy_writes_is_read() -> None:
    found = [
        {
            "thread_id": 5,
            "os_thread_id": 42,
            "thread_name": None,
            "frames": [
                {"filename": "a.py", "line": 2, "name": "f"},
                {"filename": "m.py", "line": 9, "name": "<module>"},
            ],
        },
        {"thread_id": 6, "os_thread_id": 43, "thread_name": "loader", "frames": []},
    ]
    assert read_py_spy(json.dumps(found), 42) == [
        Thread("MainThread", ["m.py:9 in <module>", "a.py:2 in f"], True),
        Thread("loader", [], False),
    ]
    for wrong in ("", "{}x", '[{"a": 1}]', "[3]"):
        with pytest.raises(ValueError, match=r"."):
            read_py_spy(wrong, 42)


def test_the_way_to_the_users_code_is_left_out() -> None:
    frames = [
        "/v/unified/worker/main.py:1 in main",
        "/v/unified/worker/entrypoint.py:2 in run",
        "/p/train.py:3 in run",
        "/v/unified/bus/calls/future.py:4 in result",
    ]
    assert users_part(frames) == frames[2:]
    assert users_part(frames[:2]) == frames[:2]
    assert not is_runtime(frames)
    assert is_runtime(["/l/lib/python3.12/threading.py:1 in wait", "/v/site-packages/unified/bus/x.py:1 in f"])
    assert is_runtime(["/v/site-packages/unified/bus/x.py:1 in f", "/v/site-packages/zmq/sugar/poll.py:6 in poll"])
    assert not is_runtime(["/l/lib/python3.12/site-packages/torch/x.py:1 in f"])


def entry(group_name: str, number: int, at_ns: int, **fields: object) -> dict[str, object]:
    return {
        "process_group": [group_name, "x"],
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": at_ns,
        "retired": True,
        "is_p2p": False,
        "record_id": number - 1,
        **fields,
    }


def test_a_flight_record_is_that_of_its_round() -> None:
    text = json.dumps(
        {
            "entries": [
                entry("0", 7, 50, retired=False),
                entry("0", 1, 150),
                entry("0", 2, 160, retired=False),
                entry("0", 3, 170, is_p2p=True),
            ]
        }
    )
    record = read(text, {"0": [0, 1], "1": [0]}, since_ns=100, now_ns=2_000_000_160)
    default, unused = record.groups
    assert (default.group, default.ranks, default.entered) == ("0", [0, 1], 2)
    assert [(each.number, each.operation, each.age_s) for each in default.recent] == [(2, "all_reduce", 2.0)]
    assert (unused.group, unused.entered, unused.recent) == ("1", 0, [])
    assert not record.is_cut


def test_a_flight_record_that_is_full_says_nothing_of_groups_it_forgot() -> None:
    text = json.dumps({"entries": [entry("0", 9, 150)]})
    record = read(text, {"0": [0, 1], "1": [0]}, since_ns=100, now_ns=200)
    assert record.is_cut
    assert [each.group for each in record.groups] == ["0"]
    assert [each.number for each in record.groups[0].recent] == [9]


def test_a_flight_record_without_entries_and_one_that_is_none() -> None:
    assert read("{}", {"0": [0]}, 0, 1).groups[0].entered == 0
    for wrong in ("", "[]", '{"entries": [{}]}', '{"entries": 3}'):
        with pytest.raises(ValueError, match=r"."):
            read(wrong, {}, 0, 1)
