"""Output of workers where the disk of their node is full for a while."""

import os
import re
from pathlib import Path

import pytest

from tests.support.full_disk import MountDisk
from unified_agent.logs import logfile
from unified_agent.logs.logfile import HELD_BYTES, LogFile, LogSlice, read_slice, read_through


def read(file: LogFile, offset: int) -> LogSlice:
    return file.with_held(read_slice(file.path, offset, 1 << 20, 3), offset, 1 << 20)


def test_a_reader_goes_on_and_so_does_the_file_when_there_is_room(
    tmp_path: Path, small_disk: MountDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfile, "RETRY_S", 0.0)
    disk = small_disk(tmp_path / "logs")
    file = LogFile(tmp_path / "logs/w/0.out", max_bytes=1 << 30, max_files=3)
    file.write(b"before\n")
    disk.fill()
    lines = [b"%07d\n" % number for number in range(200_000)]
    seen, on_disk = b"", 0
    for first in range(0, len(lines), 1000):
        file.write(b"".join(lines[first : first + 1000]))
        found = read(file, 7 + len(seen))
        while found.data and len(seen) < found.size - 7:
            assert found.offset == 7 + len(seen), "a reader that reads along misses nothing"
            seen += found.data
            found = read(file, 7 + len(seen))
    assert seen == b"".join(lines)
    assert file.end == 7 + len(seen)
    on_disk = read_slice(file.path, 0, 1, 3).size
    num_lost = file.end - on_disk - HELD_BYTES
    assert f" lines ({num_lost} bytes) dropped since " in file.lost
    assert int(file.lost.partition(" ")[0]) - num_lost // 8 in (0, 1)
    assert file.lost.endswith(f": No space left on device (disk {tmp_path}/logs)")

    late = read(file, 7)  # a reader that comes now has what is there, and then what is held
    assert late.data == seen[: on_disk - 7]
    late = read(file, on_disk)
    assert (late.offset, late.data) == (file.end - HELD_BYTES, seen[-HELD_BYTES:])

    disk.make_room()
    end = file.end
    file.write(b"after\n")
    assert read(file, end).data == b"after\n"
    assert " dropped from " in file.lost
    whole = read_through(file.path, 0, 1 << 30, 3).data
    assert whole.startswith(b"before\n0000000\n")
    assert whole.endswith(b"0199999\nafter\n")
    missing = whole.partition(b"[unified: ")[2].partition(b"]\n")[0].decode()
    assert missing == file.lost
    again = read_slice(file.path, end - 8, 1 << 20, 3)
    assert (again.offset, again.data) == (end - 8, b"0199999\nafter\n")
    file.close()


@pytest.mark.parametrize("is_copy", [False, True])
def test_the_last_of_the_room_is_left_for_others(tmp_path: Path, small_disk: MountDisk, is_copy: bool) -> None:
    disk = small_disk(tmp_path / "logs", mebibytes=16)
    path = tmp_path / "logs/w/0.out"
    file = LogFile(path, 1 << 40, 1, is_private=False) if is_copy else LogFile(path, 1 << 20, 64)
    for number in range(24 * 16):
        file.write(b"%08d" % number + b"x" * 65527 + b"\n")
    assert 1 << 20 <= disk.free < 2 << 20, "a 16th"
    assert re.search(r"^\d+ lines \(\d+ bytes\) dropped since .* on device, except for state", file.lost)
    assert file.lost.endswith(f"(disk {tmp_path}/logs)")
    file.close()
    assert b"\n%08dx" % number in path.read_bytes(), "the end of a stream, such as a traceback, may use the reserve"


@pytest.mark.parametrize("name", ["n" * 300, "file"])
def test_a_log_that_has_no_place_drops_output_and_does_no_more(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    file = LogFile(tmp_path / name / "0.out", max_bytes=100, max_files=2)
    file.write(b"x" * 2 * HELD_BYTES)
    assert "dropped since" in file.lost
    assert "(disk /" in file.lost
    file.close()


def test_a_file_system_that_does_not_tell_its_size_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([0] * 10))
    file = LogFile(tmp_path / "0.out", max_bytes=100, max_files=2)
    file.write(b"hello\n")
    assert (file.lost, file.path.read_bytes()) == ("", b"hello\n")
    file.close()


def test_what_is_held_is_written_where_nothing_is_lost(
    tmp_path: Path, small_disk: MountDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfile, "RETRY_S", 0.0)
    disk = small_disk(tmp_path / "logs")
    file = LogFile(tmp_path / "logs/w/0.out", max_bytes=1 << 20, max_files=3)
    disk.fill()
    for number in range(2000):
        file.write(b"%07d\n" % number)
    disk.make_room()
    file.write(b"after\n")
    assert file.lost == ""
    assert read_slice(file.path, 0, 1 << 20, 3).data == b"".join(b"%07d\n" % each for each in range(2000)) + b"after\n"
    file.close()
