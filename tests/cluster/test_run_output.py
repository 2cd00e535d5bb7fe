"""``unified run``: what the ranks print is what it prints, and one of them reads its stdin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_LINES = 20_000
SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    print("hello", input("name? "))
else:
    assert sys.stdin.read() == ""
for number in range(int(sys.argv[1])):
    print(f"{rank} {number}")
sys.stdout.buffer.write(b"\\xff of rank %d\\n" % rank)
print("careful", rank, file=sys.stderr)
print(rank, "half", end="")
open(f"done-{rank}", "w").close()
if rank == 1:
    while not all(os.path.exists(f"done-{each}") for each in range(3)):
        time.sleep(0.01)
    print("ly gone", end="")
    os._exit(3)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_pipe_gets_every_line_of_every_rank_and_rank_0_reads_stdin(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(SCRIPT)
    options = ["--nproc-per-node=3", "--prefix=never"]
    command = [sys.executable, "-m", "unified", "run", *options, "talk.py", str(NUM_LINES)]
    with (
        (tmp_path / "err.txt").open("wb") as err,
        subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err) as run,
    ):
        assert run.stdin is not None
        assert run.stdout is not None
        seen = b""
        while b"name? " not in seen:  # it is shown before it is a line
            seen += os.read(run.stdout.fileno(), 65536)
        run.stdin.write(b"Ann\n")
        run.stdin.flush()
        seen += run.stdout.read()
        assert run.wait(100) == 1
    lines = seen.split(b"\n")
    assert b"name? hello Ann" in lines
    for rank in range(3):
        own = [line for line in lines if line.startswith(b"%d " % rank)]
        numbers = [b"%d %d" % (rank, number) for number in range(NUM_LINES)]
        assert [line for line in own if b"half" not in line] == numbers
        assert (b"1 halfly gone" if rank == 1 else b"%d half" % rank) in own
        assert b"\xff of rank %d" % rank in lines
    said = (tmp_path / "err.txt").read_text().splitlines()
    assert {"careful 0", "careful 1", "careful 2"} < set(said)
    assert b"careful" not in seen


FILES_SCRIPT = """
import os, sys
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("out", rank, attempt)
print("err", rank, attempt, file=sys.stderr)
if rank == "1" and attempt == 0:
    os._exit(1)
"""


@pytest.mark.slow
def test_torchrun_s_log_options_do_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(FILES_SCRIPT)
    options = ["--nproc-per-node=2", "--max-restarts=1", "--log-dir=logs", "--rdzv-id=seven", "-r", "0:1", "-t", "1:3"]
    command = [sys.executable, "-m", "unified", "run", *options, "talk.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["[default1]:out 1 0", "[default1]:out 1 1"]
    said = set(done.stderr.splitlines())
    assert {"[ELASTIC-0#1] err 0 1", "[default1]:err 1 0", "[default1]:err 1 1"} < said
    assert any(line.endswith(f"files of what ranks print: {tmp_path}/logs/seven") for line in said)
    folder = tmp_path / "logs" / "seven"
    assert {str(file.relative_to(folder)) for file in folder.rglob("*.log")} == {
        f"attempt_{attempt}/{file}" for attempt in range(2) for file in ("0/stdout.log", "1/stdout.log", "1/stderr.log")
    }
    assert (folder / "attempt_1/0/stdout.log").read_text() == "out 0 1\n"
    assert (folder / "attempt_0/1/stderr.log").read_text() == "err 1 0\n"
