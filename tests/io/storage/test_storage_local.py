"""What only a folder can go through: writers that are killed, disks that are full, links, other hands."""

import errno
import fcntl
import mmap
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3 import race
from unified.errors import NotFoundError, StorageDeniedError, StorageError, StorageFullError, UsageError
from unified.storage import LocalBackend, blocks, open_storage
from unified.storage.local import SAFE_AGE_S, is_temporary, temporary_name

CALLS = ["open", "write", "pwrite", "fsync", "link", "rename", "unlink", "close", "mkdir"]


def in_child(work: Callable[[], object]) -> int:
    """Run it in a forked process: its exit code, or the negative number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before_call(number: int) -> None:
    """This process is killed before its call of the system of that number, of those that change files."""
    left = number

    def guard(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return call(*args, **kwargs)

        return guarded

    for name in CALLS:
        setattr(os, name, guard(name))


def test_a_range_is_of_the_file_that_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced between two looks at its path would be read half by the size of the other."""
    store = LocalBackend(tmp_path)
    store.write("a", b"0123456789")
    monkeypatch.delattr(LocalBackend, "stat")
    buffer = bytearray(100)
    assert store.read_into("a", buffer, 8) == 2
    assert buffer.startswith(b"89\0")


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("key", ["a", "new/folders/a"])
def test_a_writer_killed_at_any_stage_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, if_absent: bool
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", mmap.PAGESIZE)
    before, after = b"before" * 1000, [b"after" * 1000, b"more"]
    stages = {"old": 0, "new": 0}
    for number in range(100):
        store = LocalBackend(tmp_path / str(number))
        store.write("other", b"other")
        if not if_absent:
            store.write(key, before)

        def write(store: LocalBackend = store, number: int = number) -> None:
            kill_before_call(number)
            store.write(key, after, if_absent=if_absent)

        code = in_child(write)
        found = store.read(key) if store.exists(key) else None
        assert found in (b"".join(after), None if if_absent else before)
        assert [each.key for each in store.list()] == ([key] if found is not None else []) + ["other"]
        if code == 0:
            assert found == b"".join(after)
            break
        assert code == -signal.SIGKILL
        stages["old" if found != b"".join(after) else "new"] += 1
        store.write(key, b"next")
        assert store.read(key) == b"next"
    else:
        raise AssertionError("the write never came to its end")
    assert stages["old"] >= 4  # open, two blocks, fsync, and the rename or link
    assert stages["new"] >= 1


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    store = LocalBackend(tmp_path)

    def write() -> None:
        kill_before_call(2)  # after the file was made and written
        store.write("a", [b"x", b"y"])

    assert in_child(write) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert is_temporary(left.name)
    assert store.list() == []
    LocalBackend(tmp_path).write("b", b"too early to say that its writer is dead")
    assert left.exists()
    old = time.time() - SAFE_AGE_S - 1
    os.utime(left, (old, old))
    LocalBackend(tmp_path).write("c", b"")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b", "c"]


@pytest.mark.parametrize("direct", ["as it is", "not known", "does not work"])
def test_files_of_any_number_of_blocks_have_all_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    real = os.pwrite

    def refuse(descriptor: int, data: memoryview, start: int) -> int:
        if direct == "does not work" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not on this file system")
        return real(descriptor, data[: 3 * mmap.PAGESIZE], start)

    monkeypatch.setattr(blocks, "BLOCK_NBYTES", 4 * mmap.PAGESIZE)
    monkeypatch.setattr(blocks, "COPY_NBYTES", 5000)
    monkeypatch.setattr(os, "pwrite", refuse)
    if direct == "not known":
        monkeypatch.setattr(blocks, "_DIRECT", 0)
    store = LocalBackend(tmp_path)
    dice = random.Random(7)
    for nbytes in (0, 1, 4 * mmap.PAGESIZE, 4 * mmap.PAGESIZE + 1, 40 * mmap.PAGESIZE, 1_000_003):
        data = dice.randbytes(nbytes)
        cuts = sorted(dice.randrange(nbytes + 1) for _ in range(5))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, nbytes], strict=True)]
        assert store.write("a", pieces).nbytes == nbytes
        assert store.read("a") == data


def test_a_disk_that_gets_full_below_a_large_file_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def refuse(descriptor: int, data: memoryview, start: int) -> int:
        if start >= 3 * mmap.PAGESIZE:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, start)

    store = LocalBackend(tmp_path)
    store.write("a", b"old")
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", mmap.PAGESIZE)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(StorageFullError, match="Make room"):
        store.write("a", bytes(10 * mmap.PAGESIZE))
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert store.read("a") == b"old"


def test_the_file_of_a_living_writer_is_not_removed(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def pieces() -> Any:
        yield b"slow"
        begun.set()
        assert go_on.wait(100)

    thread = threading.Thread(target=lambda: LocalBackend(tmp_path).write("a", pieces()))
    thread.start()
    try:
        assert begun.wait(100)
        (part,) = tmp_path.iterdir()
        os.utime(part, (0, 0))
        LocalBackend(tmp_path).write("b", b"")
        assert part.exists()
    finally:
        go_on.set()
        thread.join()
    assert LocalBackend(tmp_path).read("a") == b"slow"


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_of_writers_that_meet_one_makes_it(tmp_path: Path, nbytes: int) -> None:
    race(LocalBackend(tmp_path), nbytes)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    store = LocalBackend(tmp_path)
    store.write("a", b"before")

    def write() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        with pytest.raises(StorageFullError, match=r"a.*nothing was changed"):
            store.write("a", bytes(1 << 20))

    assert in_child(write) == 0
    assert store.read("a") == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_where_nobody_may_write_is_said() -> None:
    with pytest.raises(StorageDeniedError, match=r"/sys.*check its owner") as caught:
        LocalBackend("/sys").write("a", b"x")
    assert isinstance(caught.value, PermissionError)


def test_folders_and_files_are_told_apart(tmp_path: Path) -> None:
    store = LocalBackend(tmp_path)
    store.write("a", b"x")
    store.write("b/c", b"y")
    for read in (store.read, store.stat, store.open_read):
        with pytest.raises(NotFoundError, match="folder"):
            read("b")
        with pytest.raises(NotFoundError, match="a file, not a folder"):
            read("a/x")
    assert not store.exists("b")
    assert not store.exists("a/x")
    for key in ("a/x", "a/x/y", "b"):
        for if_absent in (False, True):
            with pytest.raises(StorageError, match="folder"):
                store.write(key, b"z", if_absent=if_absent)
    assert [each.key for each in store.list()] == ["a", "b/c"]


def test_links_are_followed_and_rings_of_them_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "f").write_bytes(b"x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "file").symlink_to(tmp_path / "elsewhere" / "f")
    (root / "nothing").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere" / "ring").symlink_to(root)
    store = LocalBackend(root)
    assert [(each.key, each.nbytes) for each in store.list()] == [
        ("file", 1),
        ("folder/f", 1),
    ]
    assert store.read("folder/f") == b"x"


def test_writes_and_deletes_that_meet_in_a_folder_both_succeed(tmp_path: Path) -> None:
    store = LocalBackend(tmp_path, fsync=False)
    stop = threading.Event()

    def delete() -> None:
        while not stop.is_set():
            store.delete("a/b/c")

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for _ in range(200):
            store.write("a/b/c", b"x")
    finally:
        stop.set()
        thread.join()
    store.write("a/b/c", b"y")
    assert store.read("a/b/c") == b"y"


def test_files_have_the_mode_that_the_user_asks_for(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        LocalBackend(tmp_path).write("a", b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_read_is_of_one_write_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    store = LocalBackend(tmp_path)
    store.write("a", b"old" * 1000)
    with store.open_read("a") as file:
        assert file.read(3) == b"old"
        store.write("a", b"new" * 1000)
        assert file.read() == b"old" * 999


def test_a_path_is_a_store_and_where_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f.csv").touch()

    def opened(path: str) -> tuple[str, str]:
        store, prefix = open_storage(path)
        assert isinstance(store, LocalBackend)
        return str(store.root), prefix

    folder = str(tmp_path / "d")
    assert opened(folder) == opened(f"{folder}/") == opened(f"file://{folder}") == (folder, "")
    assert opened(f"{folder}/f.csv") == (folder, "f.csv")
    assert opened(f"{folder}/not/there") == (f"{folder}/not/there", "")
    assert opened(f"{folder}/*/x[12].csv") == (folder, "*/x[12].csv")
    monkeypatch.setenv("HOME", folder)
    assert opened("~/x") == (f"{folder}/x", "")
    monkeypatch.chdir(folder)
    assert opened("f.csv") == (folder, "f.csv")
    for bad in ("", "file://", "gs://bucket/x"):
        with pytest.raises(UsageError):
            open_storage(bad)


def test_names_of_temporary_files_are_known_again() -> None:
    assert is_temporary(temporary_name("0123"))
    assert not is_temporary(".unified-settings")
