"""Where the settings are read from."""

from pathlib import Path

import pytest

from unified.config.runtime import RuntimeSettings
from unified.errors import OptionError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("[checkpoint]\nkeep_last_n = 9")
    return path


def test_file_that_is_named(file: Path) -> None:
    assert RuntimeSettings.load(file, {}).checkpoint.keep_last_n == 9
    assert RuntimeSettings.load(str(file), {"UNIFIED_CONFIG": "/nothing"}).checkpoint.keep_last_n == 9


def test_file_that_the_environment_names(file: Path) -> None:
    assert RuntimeSettings.load(env={"UNIFIED_CONFIG": str(file)}).checkpoint.keep_last_n == 9
    assert RuntimeSettings.load(env={"UNIFIED_CONFIG": ""}).checkpoint.keep_last_n == 5


def test_environment_of_this_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_CONFIG", str(file))
    monkeypatch.setenv("UNIFIED_CHECKPOINT_INTERVAL_STEPS", "3")
    settings = RuntimeSettings.load()
    assert (settings.checkpoint.keep_last_n, settings.checkpoint.interval_steps) == (9, 3)


def test_what_is_wrong_in_a_file_names_the_file(file: Path) -> None:
    file.write_text("[checkpoint]\nkeep_last_n = 0")
    with pytest.raises(OptionError, match=f"^{file}: \\[checkpoint\\] keep_last_n = 0: it must be at least 1.$"):
        RuntimeSettings.load(file, {})


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nothing.toml cannot be read: No such file or directory\."):
        RuntimeSettings.load(tmp_path / "nothing.toml", {})
    with pytest.raises(OptionError, match=r"cannot be read: Is a directory\."):
        RuntimeSettings.load(tmp_path, {})


def test_file_that_is_no_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="are not TOML"):
        RuntimeSettings.load(file, {})
