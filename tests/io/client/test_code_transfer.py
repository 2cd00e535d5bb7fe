"""The way of a job's code to a master and from there to a node, disturbed: by kills, a full disk, others on the way."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.master_process import StartMaster
from unified.client.code import transfer
from unified.client.code.archive import BLOCK, pack
from unified.client.code.transfer import fetch, holding, make_room, upload
from unified.client.connection import MasterConnection
from unified.config.clusters import lock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(os.urandom(12 << 20))
    return folder


def test_a_master_that_is_killed_on_the_way_gets_and_gives_all(
    start_master: StartMaster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is asked for until it is there; the next master goes on with what the last one had."""
    master = start_master()
    with MasterConnection(master.address, timeout_s=100) as connection, pack(True, folder=str(folder)) as archive:
        ask, asked = connection.ask, 0

        def disturbed(*words: object, **named: object) -> object:
            nonlocal asked, master
            asked += 1
            if asked in (4, 20):
                master.kill()
                threading.Thread(target=revive).start()
            return ask(*words, **named)  # type: ignore[arg-type]  # whatever it is given

        def revive() -> None:
            nonlocal master
            master = start_master(bind=master_address)

        master_address = master.address
        monkeypatch.setattr(connection, "ask", disturbed)
        num_sent = upload(connection, archive)
        assert num_sent >= archive.code.size
        assert num_sent <= archive.code.size + BLOCK, "at most one part is sent twice"
        fetch(connection, archive.code.digest, tmp_path / "node/code")
        assert asked > 20
    copy = tmp_path / "node/code/weights.bin"
    assert copy.read_bytes() == (folder / "weights.bin").read_bytes()


FULL = """
import sys
from pathlib import Path
from unified.client.code.archive import pack, unpack
with pack(True, folder=sys.argv[1]) as archive:
    parts, offset = [], 0
    while part := archive.read(offset):
        parts.append(part)
        offset += len(part)
Path(sys.argv[2]).write_bytes(b"".join(parts))
try:
    unpack(Path(sys.argv[2]), Path(sys.argv[3]) / "folder")
except OSError as error:
    print(error.strerror, list(Path(sys.argv[3]).iterdir()))
"""


@pytest.mark.netns
def test_a_full_disk_is_said_and_keeps_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=6m none "$3" && exec "$0" -c "$4" "$1" "$2" "$3"'
    words = [sys.executable, str(folder), str(tmp_path / "archive"), str(tmp_path / "disk"), FULL]
    command = ["unshare", "--mount", "sh", "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "No space left on device []\n", done.stderr


def test_a_folder_is_made_once_however_many_want_it(start_master: StartMaster, folder: Path, tmp_path: Path) -> None:
    master = start_master()
    (folder / "weights.bin").write_bytes(b"few")
    with MasterConnection(master.address, timeout_s=100) as connection, pack(True, folder=str(folder)) as archive:
        upload(connection, archive)
        errors = list[Exception]()

        def want() -> None:
            try:
                fetch(connection, archive.code.digest, tmp_path / "node/code")
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=want) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert sorted(path.name for path in (tmp_path / "node").iterdir()) == ["code", "code.lock"]


def test_room_is_made_of_what_nobody_uses(tmp_path: Path) -> None:
    for age, name in enumerate(("oldest", "used", "newer", "newest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(10))
        os.utime(tmp_path / name, (age, age))
    for name in (".killed.part", "failed.log", "newest.log"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    with holding(tmp_path, "used") as is_held:
        assert is_held
        make_room(tmp_path, kept_bytes=20, idle_s=60.0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["newest", "used"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["newest.log", "used.lock"]
    os.utime(tmp_path / "newest")
    make_room(tmp_path, kept_bytes=5, idle_s=60.0)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["newest"], "it was used a moment ago"


def test_a_lock_goes_with_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed_meanwhile(path: Path) -> int | None:
        descriptor = lock(path)
        path.unlink()
        return descriptor

    with holding(tmp_path, "failed") as is_held:
        assert is_held
        with holding(tmp_path, "failed") as is_held_again:
            assert not is_held_again
        assert (tmp_path / "failed.lock").exists()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(transfer, "lock", removed_meanwhile)
    with holding(tmp_path, "failed") as is_held:
        assert not is_held, "another process has the lock of a new file"
