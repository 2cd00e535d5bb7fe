"""What every store promises, on a folder and on an S3 server."""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3 import S3Server
from unified.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError
from unified.storage import LocalBackend, S3Backend, StorageBackend

MIB = 1 << 20


@pytest.fixture(params=["local", "s3", "s3-prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageBackend]:
    if request.param == "local":
        yield LocalBackend(tmp_path / "root")
        return
    server: S3Server = request.getfixturevalue("s3_environment")
    prefix = "deep/er" if request.param == "s3-prefix" else ""
    with S3Backend(server.make_bucket(), "us-east-1", part_nbytes=5 * MIB, prefix=prefix) as backend:
        yield backend


@pytest.mark.parametrize(
    "data",
    [b"", b"x", bytes(range(256)) * 100, os.urandom(12 * MIB + 3)],
    ids=["nothing", "a byte", "small", "several parts"],
)
def test_what_was_written_is_read(store: StorageBackend, data: bytes) -> None:
    written = store.write("a/b.bin", data)
    assert written.nbytes == len(data)
    assert store.read("a/b.bin") == data
    found = store.stat("a/b.bin")
    assert (found.key, found.nbytes, found.etag) == ("a/b.bin", len(data), written.etag)
    assert store.list() == [found]


def test_any_source_will_do(store: StorageBackend, tmp_path: Path) -> None:
    data = os.urandom(11 * MIB)
    file = tmp_path / "source"
    file.write_bytes(b"skipped" + data)

    def one_buffer_used_again() -> Iterator[memoryview]:
        buffer = bytearray(1 << 18)
        for start in range(0, len(data), len(buffer)):
            buffer[:] = data[start : start + len(buffer)]
            yield memoryview(buffer)

    with file.open("rb") as opened:
        opened.seek(7)
        store.write("file", opened)
    store.write("pieces", one_buffer_used_again())
    store.write("array", memoryview(bytearray(data)).cast("q"))
    store.write("view", memoryview(data)[::2])
    assert store.read("file") == data
    assert store.read("pieces") == data
    assert store.read("array") == data
    assert store.read("view") == data[::2]


@pytest.mark.parametrize("make", [lambda: "text", lambda: 7, lambda: ["text"], lambda: io.StringIO("text")])
def test_what_is_no_bytes_is_refused_and_nothing_is_written(store: StorageBackend, make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        store.write("a", make())
    assert store.list() == []


def test_a_source_that_fails_leaves_what_was_there(store: StorageBackend) -> None:
    store.write("a", b"before")

    def failing() -> Iterator[bytes]:
        yield os.urandom(11 * MIB)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write("a", failing())
    assert store.read("a") == b"before"
    assert [stat.key for stat in store.list()] == ["a"]


def test_ranges_end_where_the_object_does(store: StorageBackend) -> None:
    store.write("a", b"0123456789")
    for start, nbytes, found in ((2, 3, b"234"), (8, 100, b"89"), (10, 5, b""), (99, 5, b""), (3, 0, b"")):
        buffer = bytearray(nbytes)
        assert bytes(buffer[: store.read_into("a", buffer, start)]) == found
    with pytest.raises(UsageError):
        store.read_into("a", bytearray(5), -1)
    with pytest.raises(NotFoundError):
        store.read_into("b", bytearray(), 3)
    with pytest.raises(NotFoundError, match="cannot read"):
        store.read_into("b", bytearray(1), 3)


def test_reads_into_memory_that_is_there(store: StorageBackend) -> None:
    data = os.urandom(11 * MIB)
    store.write("a", data)
    buffer = bytearray(len(data) + 10)
    assert store.read_into("a", buffer) == len(data)
    assert buffer == data + bytes(10)
    small = memoryview(bytearray(8)).cast("I")
    assert store.read_into("a", small, len(data) - 5) == 5
    assert small.tobytes() == data[-5:] + bytes(3)
    assert store.read_into("a", bytearray(), 3) == 0


def test_a_key_is_seekable_as_a_file(store: StorageBackend) -> None:
    data = os.urandom(3 * MIB)
    store.write("a", data)
    with store.open_read("a") as file:
        assert file.read(10) == data[:10]
        assert file.seek(-7, os.SEEK_END) == len(data) - 7
        assert file.read() == data[-7:]
        file.seek(0)
        assert file.read() == data
    with pytest.raises(FileNotFoundError):
        store.open_read("b")


def test_lists_by_prefix_in_order(store: StorageBackend) -> None:
    keys = ["a", "a/1", "a-b", "ab/c/d", "é", "z"]
    keys.remove("a/1")  # a file cannot also be a folder
    for key in keys:
        store.write(key, key.encode())
    assert [stat.key for stat in store.list()] == sorted(keys)
    assert [stat.key for stat in store.list("a")] == ["a", "a-b", "ab/c/d"]
    assert [stat.key for stat in store.list("ab/")] == ["ab/c/d"]
    assert [stat.key for stat in store.list("ab/c/d")] == ["ab/c/d"]
    assert [stat.key for stat in store.list("ab/x")] == []
    assert store.list("a") == [store.stat("a"), store.stat("a-b"), store.stat("ab/c/d")]


def test_what_is_deleted_is_gone(store: StorageBackend) -> None:
    store.write("a/b/c", b"x")
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert not store.exists("a/b/c")
    assert store.list() == []
    store.write("a", b"y")  # the folders are gone too
    assert store.read("a") == b"y"


def test_what_is_not_there_is_said_so(store: StorageBackend) -> None:
    assert not store.exists("a")
    assert store.list("a") == []
    for read in (store.read, store.stat, lambda key: store.read_into(key, bytearray(3))):
        with pytest.raises(NotFoundError, match="a/b"):
            read("a/b")
    assert issubclass(NotFoundError, FileNotFoundError)
    assert issubclass(NotFoundError, StorageError)


def test_an_object_that_is_there_is_not_replaced_if_so_asked(store: StorageBackend) -> None:
    store.write("a", b"first", if_absent=True)
    with pytest.raises(AlreadyExistsError, match="a"):
        store.write("a", b"second", if_absent=True)
    assert store.read("a") == b"first"
    store.write("a", b"third")
    assert store.read("a") == b"third"


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\0b"])
def test_keys_that_could_lead_elsewhere_are_refused(store: StorageBackend, key: str) -> None:
    with pytest.raises(UsageError, match="no key"):
        store.write(key, b"x")
    with pytest.raises(ValueError, match="no key"):
        store.read(key)


def test_a_store_can_be_sent_to_another_process(store: StorageBackend) -> None:
    store.write("a", b"x")
    with pickle.loads(pickle.dumps(store)) as other:
        assert other.read("a") == b"x"


def test_a_child_that_was_forked_reads_beside_its_parent(store: StorageBackend) -> None:
    data = os.urandom(11 * MIB)
    store.write("a", data)
    assert store.read("a") == data  # so that there are connections and threads
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = store.read("a") == data
        finally:
            os._exit(0 if same else 1)
    assert store.read("a") == data
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
