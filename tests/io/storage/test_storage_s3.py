"""What only a bucket can go through: answers that are lost, refusals, pages, endpoints."""

import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3 import SECRET_KEY, SESSION_TOKEN, Asked, Fault, S3Server, faulty, race
from unified.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageDeniedError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)
from unified.storage import S3Backend, open_storage, s3

MIB = 1 << 20
PARTS = 5 * MIB
"""Of one part in these tests: the least there is."""


@contextmanager
def behind(
    server: S3Server, decide: Callable[[Asked], Fault] = lambda asked: None, **options: Any
) -> Iterator[S3Backend]:
    """A store behind a relay that does to each request what `decide` says; at the end no upload is left in it."""
    with (
        faulty(server, decide) as url,
        S3Backend(server.make_bucket(), endpoint_url=url, part_nbytes=PARTS, **options) as store,
    ):
        yield store
    assert uploads(server, store.bucket) == []


def nth(number: int, fault: str, matches: Callable[[Asked], bool]) -> Callable[[Asked], Fault]:
    """This fault for the first `number` requests that match."""
    seen = itertools.count()
    return lambda asked: fault if matches(asked) and next(seen) < number else None


def is_put(asked: Asked) -> bool:
    return asked.method == "PUT" and "/a" in asked.path


def is_get(asked: Asked) -> bool:
    return asked.method == "GET" and "/a" in asked.path


def is_complete(asked: Asked) -> bool:
    return asked.method == "POST" and "uploadId=" in asked.path


def noting(asked: list[str], decide: Callable[[Asked], Fault] = lambda asked: None) -> Callable[[Asked], Fault]:
    """The range of each read as well."""

    def note(request: Asked) -> Fault:
        if is_get(request):
            asked.append(request.headers["range"])
        return decide(request)

    return note


def uploads(server: S3Server, bucket: str) -> list[str]:
    import boto3

    client = boto3.client("s3", endpoint_url=server.url)
    try:
        return [each["Key"] for each in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]
    finally:
        client.close()


@pytest.mark.parametrize("nbytes", [10, 6 * MIB])
def test_of_writers_that_meet_one_makes_it(s3_environment: S3Server, nbytes: int) -> None:
    with behind(s3_environment) as store:
        race(store, nbytes)


@pytest.mark.parametrize(
    ("fault", "number", "matches", "nbytes"),
    [
        ("busy", 2, is_put, 10),
        ("busy", 2, is_put, 11 * MIB),
        ("busy", 1, is_complete, 11 * MIB),
        ("lost", 1, is_put, 10),
        ("lost", 1, is_put, 11 * MIB),
        ("lost", 1, is_complete, 11 * MIB),
    ],
)
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_write_gets_over_faults(
    s3_environment: S3Server, fault: str, number: int, matches: Callable[[Asked], bool], nbytes: int, if_absent: bool
) -> None:
    """Also where the store has done it, and refuses what was done when it is asked again."""
    data = os.urandom(nbytes)
    with behind(s3_environment, nth(number, fault, matches)) as store:
        written = store.write("a", data, if_absent=if_absent)
        assert store.read("a") == data
        assert store.stat("a").etag == written.etag


@pytest.mark.parametrize("fault", ["busy", "cut"])
@pytest.mark.parametrize("nbytes", [100, 11 * MIB])
def test_a_read_goes_on_where_it_broke_off(s3_environment: S3Server, fault: str, nbytes: int) -> None:
    data = os.urandom(nbytes)
    asked: list[str] = []
    with behind(s3_environment, noting(asked, nth(2, fault, is_get))) as store:
        store.write("a", data)
        assert store.read("a") == data
        buffer = bytearray(50)
        assert store.read_into("a", buffer, 1) == 50
        assert bytes(buffer) == data[1:51]
    if fault == "cut" and nbytes == 100:
        assert asked == ["bytes=0-99", "bytes=50-99", "bytes=75-99", "bytes=1-50"]


def test_a_range_of_one_part_is_one_request(s3_environment: S3Server) -> None:
    asked: list[str] = []
    with behind(s3_environment, lambda request: asked.append(request.method)) as store:
        store.write("a", b"0123456789")
        asked.clear()
        found = bytearray(PARTS)
        assert store.read_into("a", found, 8) == 2
        assert found[:2] == b"89"
        assert asked == ["GET"]


def test_a_read_is_of_one_write_whatever_is_written_meanwhile(s3_environment: S3Server) -> None:
    old, new = b"o" * 11 * MIB, b"n" * 12 * MIB
    bucket = s3_environment.make_bucket()
    with S3Backend(bucket, part_nbytes=PARTS) as writer:
        writer.write("a", old)
        once = threading.Lock()

        def replace(asked: Asked) -> Fault:
            if is_get(asked) and "bytes=0-" not in asked.headers["range"] and once.acquire(blocking=False):
                writer.write("a", new)
            return None

        with faulty(s3_environment, replace) as url, S3Backend(bucket, endpoint_url=url, part_nbytes=PARTS) as reader:
            assert reader.read("a") == new
            assert once.locked()


@pytest.mark.parametrize(
    ("fault", "error", "builtin"),
    [
        ("deny", StorageDeniedError, PermissionError),
        ("full", StorageFullError, OSError),
        ("busy", StorageUnavailableError, ConnectionError),
    ],
)
@pytest.mark.parametrize("nbytes", [10, 11 * MIB])
def test_what_does_not_pass_is_said_and_nothing_is_left(
    s3_environment: S3Server, fault: str, error: type[Exception], builtin: type[Exception], nbytes: int
) -> None:
    with behind(s3_environment, nth(1000, fault, is_put), max_attempts=2) as store:
        with pytest.raises(error, match=f"cannot write s3://{store.bucket}/a") as caught:
            store.write("a", bytes(nbytes))
        assert isinstance(caught.value, builtin)
        assert store.list() == []


@pytest.mark.parametrize("is_done", [False, True])
def test_a_writer_killed_at_any_request_leaves_the_old_or_the_new(s3_environment: S3Server, is_done: bool) -> None:
    """Before the store does what is asked, and after."""
    bucket = s3_environment.make_bucket()
    old, new = b"old", b"n" * 6 * MIB
    known = threading.Event()
    child, left = 0, 0

    def kill_in_time(_: Asked) -> Fault:
        nonlocal left
        assert known.wait(100)
        left -= 1
        if left == -1:
            os.kill(child, signal.SIGKILL)
            return "busy"
        return None

    def decide(asked: Asked) -> Fault:
        return None if is_done else kill_in_time(asked)

    def after(asked: Asked) -> None:
        if is_done:
            kill_in_time(asked)

    outcomes = []
    with S3Backend(bucket, part_nbytes=PARTS) as store, faulty(s3_environment, decide, after) as url:
        for number in (0, 2, 3, 4):  # begin, a second part, complete; four requests are all
            store.write("a", old)
            known.clear()
            left = number
            child = os.fork()
            if child == 0:
                try:
                    S3Backend(bucket, endpoint_url=url, part_nbytes=PARTS, num_parallel=1).write("a", new)
                finally:
                    os._exit(0)
            known.set()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            found = store.read("a")
            assert [each.key for each in store.list()] == ["a"]
            assert code == (0 if number == 4 else -signal.SIGKILL)
            assert found in (old, new)
            outcomes.append("new" if found == new else "old")
    # Only what the store has completed is seen.
    assert outcomes == ["old", "old", "new" if is_done else "old", "new"]


def test_a_bucket_that_is_not_there_is_named(s3_environment: S3Server) -> None:
    with S3Backend("no-such-bucket") as store:
        for ask in (store.list, lambda: store.write("a", b"x"), lambda: store.write("a", b"x", if_absent=True)):
            with pytest.raises(NotFoundError, match="no bucket 'no-such-bucket'"):
                ask()


def test_a_store_that_is_not_there_is_named() -> None:
    pytest.importorskip("boto3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "y")
        with (
            S3Backend("bucket", "us-east-1", endpoint_url="http://127.0.0.1:9", max_attempts=1) as store,
            pytest.raises(StorageUnavailableError, match=r"127\.0\.0\.1:9.*check the endpoint"),
        ):
            store.read("a")


def test_no_credentials_are_said(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with S3Backend("bucket") as store, pytest.raises(StorageDeniedError, match="no usable credentials"):
        store.list()


@pytest.mark.parametrize(
    ("profile", "key_id", "token"), [(None, "AKIADEFAULTDEFAULT00", None), ("training", "AKIATRAININGTRAINING", "t0k")]
)
def test_credentials_of_a_file_are_those_of_its_profile(
    s3_environment: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    profile: str | None,
    key_id: str,
    token: str | None,
) -> None:
    """The next links of the standard chain, after the variables that hold the keys themselves."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text(
        f"[default]\naws_access_key_id = AKIADEFAULTDEFAULT00\naws_secret_access_key = {SECRET_KEY}\n\n"
        f"[training]\naws_access_key_id = AKIATRAININGTRAINING\naws_secret_access_key = {SECRET_KEY}\n"
        "aws_session_token = t0k\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    if profile is not None:
        monkeypatch.setenv("AWS_PROFILE", profile)
    signed: set[tuple[str, str | None]] = set()

    def note(asked: Asked) -> Fault:
        (found,) = re.findall(r"Credential=(\w+)/", asked.headers["authorization"])
        signed.add((found, asked.headers.get("x-amz-security-token")))
        return None

    with faulty(s3_environment, note) as url, S3Backend(s3_environment.make_bucket(), endpoint_url=url) as store:
        store.write("a", b"x")
        assert store.read("a") == b"x"
        assert [each.key for each in store.list()] == ["a"]
    assert signed == {(key_id, token)}


def test_credentials_are_neither_logged_nor_shown(
    s3_environment: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("botocore"), "level", logging.NOTSET)
    logging.getLogger("botocore").manager._clear_cache()  # type: ignore[attr-defined]
    with caplog.at_level(logging.DEBUG), S3Backend(s3_environment.make_bucket()) as store:
        store.write("a", b"x")
        with pytest.raises(NotFoundError) as caught:
            store.read("b")
        shown = caplog.text + repr(store) + str(caught.value)
    assert "s3" in shown
    assert SECRET_KEY not in shown
    assert SESSION_TOKEN not in shown
    with pytest.raises(UsageError, match="no user and no password") as refused:
        S3Backend("bucket", endpoint_url="http://user:hidden@127.0.0.1:9")
    assert "hidden" not in str(refused.value)


def test_lists_page_by_page(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "LIST_PAGE", 7)
    keys = [f"k/{number:03}" for number in range(30)]
    with S3Backend(s3_environment.make_bucket()) as store:
        for key in keys:
            store.write(key, b"")
        assert [each.key for each in store.list("k/")] == keys


def test_parts_go_side_by_side_and_not_too_many(s3_environment: S3Server) -> None:
    lock = threading.Lock()
    two = threading.Event()
    now: set[int] = set()
    most = 0

    def decide(asked: Asked) -> Fault:
        nonlocal most
        if "partNumber=" in asked.path:
            number = int(re.findall(r"partNumber=(\d+)", asked.path)[0])
            with lock:
                now.add(number)
                most = max(most, len(now))
                if len(now) == 2:
                    two.set()
            assert two.wait(100)
            with lock:
                now.discard(number)
        return None

    data = os.urandom(27 * MIB)
    with behind(s3_environment, decide, num_parallel=2) as store:
        store.write("a", data)
        assert store.read("a") == data
    assert most == 2


def test_the_rest_of_a_file_is_read_in_one_request(s3_environment: S3Server) -> None:
    asked: list[str] = []
    data = os.urandom(3 * MIB)
    with behind(s3_environment, noting(asked)) as store:
        store.write("a", data)
        with store.open_read("a") as file:
            assert file.read(10) + file.read() == data
    assert asked == [f"bytes=0-{MIB - 1}", f"bytes={MIB}-{3 * MIB - 1}"]


def test_a_prefix_is_of_every_key(bucket: str) -> None:
    with S3Backend(bucket) as whole, S3Backend(bucket, prefix="/runs/1/") as part:
        part.write("a", b"x")
        whole.write("runs/10", b"y")
        assert [each.key for each in whole.list()] == ["runs/1/a", "runs/10"]
        assert [each.key for each in part.list()] == ["a"]
        part.delete("a")
        assert [each.key for each in whole.list()] == ["runs/10"]


def test_an_address_is_a_store_and_where_in_it(bucket: str) -> None:
    store, prefix = open_storage(f"s3://{bucket}/a/b/")
    with store:
        assert isinstance(store, S3Backend)
        assert (store.bucket, prefix) == (bucket, "a/b")
        store.write(f"{prefix}/c", b"x")
        assert [each.key for each in store.list(prefix)] == ["a/b/c"]
    with pytest.raises(UsageError, match="no name of a bucket"):
        open_storage("s3://")


@pytest.mark.parametrize(
    "arguments",
    [
        {"part_nbytes": 1000},
        {"num_parallel": 0},
        {"max_attempts": 0},
        {"timeout_s": 0},
        {"prefix": "../x"},
        {"endpoint_url": "host"},
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        S3Backend("bucket", **arguments)  # type: ignore[arg-type]


def test_a_refusal_to_replace_comes_before_the_work(s3_environment: S3Server) -> None:
    with S3Backend(s3_environment.make_bucket()) as store:
        store.write("a", b"x")

        def pieces() -> object:
            raise ZeroDivisionError
            yield b""

        with pytest.raises(AlreadyExistsError):
            store.write("a", pieces(), if_absent=True)  # type: ignore[arg-type]


def test_importing_is_cheap_and_a_missing_botocore_is_named() -> None:
    script = (
        "import sys; sys.modules['botocore.session'] = None\n"
        "from unified.storage import S3Backend, LocalBackend, open_storage\n"
        "assert not {'torch', 'numpy', 'botocore', 'pyarrow'} & set(sys.modules)\n"
        "try: open_storage('s3://bucket/x')[0].read('a')\n"
        "except ImportError as error: print(error)\n"
        "import importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "del sys.modules['botocore']\n"
        "from unified.checkpoint import CheckpointManager\n"
        "try: CheckpointManager('s3://bucket/x')\n"
        "except ImportError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert said.stdout.count("pip install 'unified-runtime[s3]'") == 2
