"""Records of running clusters: believed while their lock is held, in a folder that is nobody else's, on this host."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from unified.client.connection import connect_master
from unified.config import clusters
from unified.config.addresses import find_master, named_master
from unified.config.clusters import ClusterRecord, kept_cluster, living_clusters
from unified.errors import UsageError
from unified.security.curve import new_key
from unified.security.keys import find_key, write_key

ADDRESS = "tcp://127.0.0.1:9"


@pytest.fixture
def run_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "run"
    root.mkdir(mode=0o700)
    monkeypatch.setenv("UNIFIED_RUN_DIR", str(root))
    monkeypatch.setenv("UNIFIED_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UNIFIED_MASTER", raising=False)
    return root


@pytest.fixture
def kept(run_root: Path) -> Iterator[ClusterRecord]:
    folder = run_root / "e1-abcdef"
    folder.mkdir()
    held = clusters.lock(folder / clusters.LOCK_NAME)
    assert held is not None
    key = folder / clusters.KEY_NAME
    write_key(key, new_key())
    record = ClusterRecord(
        address=ADDRESS, home="/h", pid=os.getpid(), space=clusters.space(), nodes=1, devices=2, idle_s=60.0,
        key_file=str(key),
    )  # fmt: skip
    clusters.write_record(folder, record)
    yield record
    os.close(held)


def rewrite(run_root: Path, record: ClusterRecord) -> None:
    clusters.write_record(run_root / "e1-abcdef", record)


def test_it_is_found_unless_another_is_named(
    run_root: Path, kept: ClusterRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_cluster() == kept
    assert find_master(None) == ADDRESS
    assert named_master(None) is None
    assert find_master("other:1") == "tcp://other:1"
    assert find_master("local") is None
    monkeypatch.setenv("UNIFIED_MASTER", "")
    assert find_master(None) is None
    monkeypatch.setenv("UNIFIED_MASTER", "named:1")
    assert find_master(None) == "tcp://named:1"


def test_a_drivers_own_is_for_those_who_look_and_not_for_jobs(run_root: Path, kept: ClusterRecord) -> None:
    drivers = msgspec.structs.replace(kept, idle_s=None)
    with pytest.raises(UsageError, match="which master"):
        connect_master("local")
    rewrite(run_root, drivers)
    for asked in (None, "local"):
        with connect_master(asked) as connection:
            assert connection.address == ADDRESS
    assert living_clusters() == [drivers]
    assert kept_cluster() is None
    assert find_master(None) is None


def test_its_key_is_found_by_its_address(run_root: Path, kept: ClusterRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_KEY_FILE", "")
    assert find_key(ADDRESS) is not None
    assert find_key("tcp://127.0.0.1:10") is None
    assert find_key(ADDRESS, os.environ) is None  # a daemon's own environment says all


def test_a_lock_that_is_free_a_dead_process_another_space_and_a_torn_record_are_not_believed(
    run_root: Path, kept: ClusterRecord
) -> None:
    for other in (msgspec.structs.replace(kept, space="elsewhere"), msgspec.structs.replace(kept, pid=2**22 + 1)):
        rewrite(run_root, other)
        assert living_clusters() == []
    folder = run_root / "e2-abcdef"
    folder.mkdir()
    (folder / clusters.LOCK_NAME).touch()
    clusters.write_record(folder, kept)
    (run_root / "e1-abcdef" / clusters.RECORD_NAME).write_text("{")
    assert living_clusters() == []
    clusters.sweep(run_root)
    assert [path.name for path in run_root.iterdir()] == ["e1-abcdef"]


def test_a_folder_that_others_may_write_to_or_own_is_not_believed(
    run_root: Path, kept: ClusterRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_root.chmod(0o770)
    assert living_clusters() == []
    run_root.chmod(0o700)
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 12345)
        assert living_clusters() == []
    (tmp_path / "home").rename(tmp_path / "away")
    (tmp_path / "link").symlink_to(run_root)
    monkeypatch.setenv("UNIFIED_RUN_DIR", str(tmp_path / "link"))
    assert living_clusters() == []


def test_the_one_of_unified_up_is_found_from_a_shell_with_other_folders(
    run_root: Path, kept: ClusterRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert living_clusters() == [kept]
    monkeypatch.setenv("UNIFIED_RUN_DIR", str(tmp_path / "other"))  # as another TMPDIR or XDG_RUNTIME_DIR does
    assert living_clusters() == [kept]
    assert find_master(None) == ADDRESS
    run_root.chmod(0o770)
    assert living_clusters() == []
    monkeypatch.setenv("UNIFIED_HOME", str(tmp_path / "another"))
    assert living_clusters() == []
