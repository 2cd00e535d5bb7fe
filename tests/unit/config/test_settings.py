"""Folders that the daemons make: private whatever the umask, and never through a symbolic link."""

import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from unified.config import settings
from unified.config.settings import make_folder, make_private, run_root
from unified.errors import UsageError
from unified.security.keys import default_key_file


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folders_are_made_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    make_folder(tmp_path / "a/b/c")
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert mode(make_private(tmp_path / "d/e")) == mode(tmp_path / "d") == 0o700


def test_a_folder_that_is_there_is_made_private_only_where_it_has_to_be(tmp_path: Path) -> None:
    for name in ("logs", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    make_folder(tmp_path / "logs")
    assert mode(tmp_path / "logs") == 0o755
    assert mode(make_private(tmp_path / "run")) == 0o700


def test_a_folder_whose_name_is_not_utf_8_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder '.*\\udcff/home' cannot be used: .*UNIFIED_HOME"):
        make_folder(tmp_path / os.fsdecode(b"\xff") / "home")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_dangling", [False, True])
def test_no_symbolic_link_is_followed(tmp_path: Path, is_dangling: bool) -> None:
    victim = tmp_path / "victim"
    if not is_dangling:
        victim.mkdir()
        victim.chmod(0o755)
    (tmp_path / "run").symlink_to(victim)
    with pytest.raises(OSError, match="run"):
        make_private(tmp_path / "run")
    assert not victim.exists() if is_dangling else mode(victim) == 0o755


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not to uid 12345: set UNIFIED_RUN_DIR"):
        make_private(tmp_path / "run")


def test_a_runtime_folder_of_another_host_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM hands on the variable of the login node, whose folder a compute node does not have."""
    monkeypatch.delenv("UNIFIED_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert run_root() == Path("/tmp/unified")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    assert run_root() == Path(tempfile.gettempdir()) / f"unified-{os.getuid()}"


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_folder_too_long_for_sockets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (tmp_path / ("x" * 70)).mkdir()
    monkeypatch.delenv("UNIFIED_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(variable, str(tmp_path / ("x" * 70)))
    assert run_root() == Path("/tmp", f"unified-{os.getuid()}")


def test_a_chosen_folder_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_RUN_DIR", f"/tmp/{'x' * 66}")
    with pytest.raises(UsageError, match=r"UNIFIED_RUN_DIR=/tmp/x* has 71 bytes, but at most 70 fit"):
        settings.make_run_root()
    assert not Path(f"/tmp/{'x' * 66}").exists()


def test_without_a_home_or_rights_in_it_state_is_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("UNIFIED_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = tmp_path / f"unified-{os.getuid()}"
    for _ in range(2):
        assert settings.home() == private / "home"
    assert mode(private) == 0o700
    why = f"uid {os.getuid()} has no home folder (HOME is not set); set UNIFIED_HOME to use another place."
    assert capsys.readouterr().err == f"unified: state and logs are in {private}/home, because {why}\n"
    assert default_key_file() == private / "home/cluster.key"
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    assert settings.home() == tmp_path / "mine/.local/state/unified"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # as root may write anywhere
    assert settings.home() == private / "home"
    assert f"because {tmp_path}/mine/.local/state/unified cannot be written" in capsys.readouterr().err
