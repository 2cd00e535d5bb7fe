"""The cluster key's file, who may read it, where it is needed, and that it shows itself to nobody."""

import inspect
import os
import pickle
import re
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.pretty import pretty_repr

from tests.support.runtime import ENTRY, launch_of
from unified.cli.main import main
from unified.devices import cuda_devices
from unified.errors import KeyFileError, UsageError
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.worker_agent import Launch
from unified.security.keys import (
    ClusterKey,
    check_listening,
    default_key_file,
    find_key,
    is_loopback,
    load_key,
    may_go_without,
    receive_key,
    write_key,
)

KEY = ClusterKey(public="p" * 40, secret="s" * 39 + "!")
FAR, NEAR = "tcp://10.0.0.1:7077", "tcp://127.0.0.1:7077"


def test_what_is_written_is_read_again_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.key"
    before = os.umask(0)
    try:
        write_key(path, KEY)
    finally:
        os.umask(before)
    assert load_key(path) == KEY
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.write_text("precious")
    with pytest.raises(KeyFileError, match="is there already"):
        write_key(path, KEY)
    assert path.read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyFileError, match="is there already"):
        write_key(tmp_path / "link", KEY)


def test_a_key_comes_through_a_pipe_that_stays_open(tmp_path: Path) -> None:
    write_key(tmp_path / "cluster.key", KEY)
    text = (tmp_path / "cluster.key").read_bytes()
    read, write = os.pipe()
    try:
        os.write(write, text[:-50])
        with pytest.raises(KeyFileError, match=r"no cluster key came through descriptor \d+ within 0.05 s"):
            receive_key(read, timeout_s=0.05)
        os.write(write, text)
        assert receive_key(read) == KEY
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("text", [b"", b"no key\n", b"x" * 70_000])
def test_what_comes_through_a_pipe_and_is_no_key_is_refused(text: bytes) -> None:
    read, write = os.pipe()

    def write_all() -> None:
        os.write(write, text)
        os.close(write)

    writer = threading.Thread(target=write_all)
    writer.start()
    with pytest.raises(KeyFileError, match=r"descriptor \d+ did not deliver a cluster key"):
        receive_key(read)
    writer.join()
    os.close(read)
    with pytest.raises(KeyFileError, match="Bad file descriptor"):
        receive_key(read)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o700 | 0o010])
def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "cluster.key"
    write_key(path, KEY)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=rf"open to others \(mode {mode:04o}\): `chmod 600 {re.escape(str(path))}`"):
        load_key(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    write_key(path, KEY)
    os.chown(path, 12345, -1)
    with pytest.raises(KeyFileError, match="belongs to uid 12345, not to uid 0: `chown 0 "):
        load_key(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "said"),
    [
        pytest.param(0, 4321, 0o440, "", id="of-a-group-of-ours"),
        pytest.param(0, 4321, 0o640, "", id="which-root-may-write"),
        pytest.param(0, 4321, 0o660, "open to others", id="which-the-group-may-write"),
        pytest.param(0, 4321, 0o444, "open to others", id="which-all-may-read"),
        pytest.param(0, 4322, 0o440, "cannot be read", id="of-another-group"),
        pytest.param(12345, 4321, 0o440, "belongs to uid 12345", id="of-another-user"),
    ],
)
def test_a_key_as_kubernetes_mounts_it_is_taken(owner: int, group: int, mode: int, said: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not the test's own, which is closed to others
        Path(folder).chmod(0o755)
        path = Path(folder, "cluster.key")
        write_key(path, KEY)
        os.chown(path, owner, group)
        path.chmod(mode)
        answer = as_somebody_else_reads(path)
        assert said in answer if said else answer == KEY.public


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_credential_of_systemd_is_taken() -> None:
    """Where its file system has ACLs, it stays root's and of root's group."""
    entries = [(1, 4, -1), (2, 4, 1234), (4, 0, -1), (16, 4, -1), (32, 0, -1)]  # owner, uid 1234, group, mask, others
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "cluster.key")
        write_key(path, KEY)
        try:
            os.setxattr(path, "system.posix_acl_access", acl)
        except OSError as error:
            pytest.skip(f"no ACLs in {folder}: {error.strerror}")
        assert path.stat().st_mode & 0o777 == 0o440
        assert as_somebody_else_reads(path) == KEY.public
        path.chmod(0o444)
        assert "open to others" in as_somebody_else_reads(path)


def as_somebody_else_reads(path: Path) -> str:
    """Return the public key, or the error, of a process of uid 1234 and groups 1234 and 4321."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.setgroups([4321])
        os.setgid(1234)
        os.setuid(1234)
        try:
            os.write(write, load_key(path).public.encode())
        except KeyFileError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    answer = os.read(read, 4096).decode()
    os.close(read)
    return answer


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    for text in ("", 'secret-key = "short"', 'public-key = "' + "p" * 40 + '"', "\0\xff" * 1000):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(KeyFileError, match="is no cluster key"):
            load_key(path)
    with pytest.raises(KeyFileError, match="cannot be read: Is a directory"):
        load_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="not a plain file"):
        load_key(tmp_path / "pipe")
    with pytest.raises(KeyFileError, match=r"cannot be read: No such file.*`unified key new` makes a key"):
        load_key(tmp_path / "nowhere")


def test_which_key_is_used(tmp_path: Path) -> None:
    named, default = tmp_path / "named.key", default_key_file({"XDG_CONFIG_HOME": str(tmp_path)})
    other = ClusterKey(public="q" * 40, secret="t" * 40)
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_key(FAR, env) is None
    write_key(default, KEY)
    write_key(named, other)
    assert find_key(FAR, env) == KEY
    assert find_key(NEAR, env) is None, "clusters that live on one host need none"
    assert find_key(FAR, {**env, "UNIFIED_KEY_FILE": str(named)}) == other
    assert find_key(NEAR, {**env, "UNIFIED_KEY_FILE": str(named)}) == other
    assert find_key(FAR, {**env, "UNIFIED_KEY_FILE": ""}) is None
    with pytest.raises(KeyFileError):
        find_key(NEAR, {"UNIFIED_KEY_FILE": str(tmp_path / "gone")})


@pytest.mark.parametrize("function", [default_key_file, find_key, may_go_without, cuda_devices])
def test_help_shows_nothing_of_the_environment(function: Callable[..., Any]) -> None:
    assert inspect.signature(function).parameters["env"].default is None


ONLY_HERE = "127.0.0.1 tcp://127.0.0.2:7077 tcp://localhost:0 LOCALHOST ::1 [::1] tcp://[::1]:7077"
ELSEWHERE = """
    10.0.0.1 tcp://10.0.0.1:7077 tcp://0.0.0.0:0 tcp://[::]:7077 tcp://[fd00::2]:7077 fe80::1%eth0 tcp://*:7077 gpu-1
    tcp://gpu-1:1 127.0.0.1.example.org"""


@pytest.mark.parametrize("address", [*ONLY_HERE.split(), *ELSEWHERE.split(), ""])
def test_what_only_this_host_reaches(address: str) -> None:
    assert is_loopback(address) == (address in ONLY_HERE.split())


def test_beyond_loopback_it_takes_a_key_or_the_word() -> None:
    assert check_listening("m", [NEAR, "tcp://[::1]:0"], None, insecure=False) is None
    assert check_listening("m", [FAR], KEY, insecure=False) is None
    assert check_listening("m", [FAR], KEY, insecure=True) is None, "the key is used all the same"
    with pytest.raises(UsageError, match=r"m would listen on tcp://10.0.0.1:7077, .*`unified key new`.*--insecure"):
        check_listening("m", [NEAR, FAR, FAR], None, insecure=False)
    warning = check_listening("m", [FAR], None, insecure=True)
    assert warning is not None
    assert "without a cluster key" in warning


def test_the_word_may_be_said_in_the_environment() -> None:
    assert not may_go_without({})
    assert not may_go_without({"UNIFIED_INSECURE": "0"})
    assert may_go_without({"UNIFIED_INSECURE": "1"})
    with pytest.raises(UsageError, match="UNIFIED_INSECURE='maybe' is neither 1 nor 0"):
        may_go_without({"UNIFIED_INSECURE": "maybe"})


def test_nothing_that_is_printed_has_the_secret() -> None:
    role = RoleSpec(name="w", kind="simple", entry_point=ENTRY)
    launch = launch_of(JobSpec(name="j", roles=[role]), master=FAR, key=KEY)
    for text in (repr(KEY), str(KEY), f"{KEY}", repr(launch), str(launch), pretty_repr(launch), pretty_repr([KEY])):
        assert KEY.secret not in text
        assert KEY.fingerprint in text
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        pickle.dumps(launch)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(launch), type=Launch).key == KEY


def test_the_command_makes_a_key_and_shows_its_fingerprint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("UNIFIED_KEY_FILE")
    assert main(["key", "new"]) == 0
    key = load_key(default_key_file())
    made = capsys.readouterr().out
    assert main(["key", "show"]) == 0
    shown = capsys.readouterr().out
    for text in (made, shown):
        assert key.fingerprint in text
        assert key.secret not in text
    assert main(["key", "new"]) == 2, "it is there already"
    monkeypatch.setenv("UNIFIED_KEY_FILE", str(tmp_path / "elsewhere"))
    assert main(["key", "show"]) == 2
    assert main(["key", "new"]) == 0
    assert load_key(tmp_path / "elsewhere") != key
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["key", "new", "../third"]) == 0
    assert f"UNIFIED_KEY_FILE={tmp_path / 'third'}" in capsys.readouterr().out
