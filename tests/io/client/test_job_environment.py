"""Virtual environments with the packages that jobs require: later jobs use them too."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.wheels import wheel
from unified.client.code.environment import MARK, make


def test_nobody_may_write_into_an_environment_that_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip, without an index. What a killed maker left is replaced, although nobody may write there."""
    wheel(tmp_path / "wheels", "of_this_job", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "requirements.txt").write_text("of_this_job==1.0\n")
    mode, folder = os.stat(sys.executable).st_mode, tmp_path / "environment"
    (folder / "left").mkdir(parents=True)
    (folder / "left/file").touch()
    (folder / "left").chmod(0o555)
    folder.chmod(0o555)
    assert make(folder, tmp_path / "requirements.txt") == ""
    assert (folder / MARK).exists()
    assert folder.with_name("environment.log").stat().st_mode & 0o777 == 0o600
    assert not (folder / "left").exists()
    (module,) = folder.glob("lib/*/site-packages/of_this_job.py")
    content = [path for path in module.parent.rglob("*") if not path.is_symlink()]
    writable = [path for path in (folder, folder / "bin", *module.parents[:2], *content) if _is_writable(path)]
    assert writable == []
    command = [str(folder / "bin/python"), "-c", "import of_this_job; print(of_this_job.VERSION)"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout == "1.0\n"
    assert os.stat(sys.executable).st_mode == mode, "a link in the environment leads there"


def _is_writable(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o222)
