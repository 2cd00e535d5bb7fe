"""What a user installs is whole, and leaves the user's own module names alone."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=50,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's packages and nothing of the checkout."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def python(code: str, path: list[Path], cwd: Path) -> str:
    """Run code with this module path alone. `-S` leaves out the .pth file of the editable install."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def dependencies() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


@pytest.mark.slow
def test_every_module_of_the_wheel_can_be_imported(installed: Path, tmp_path: Path) -> None:
    modules = sorted(
        ".".join(file.relative_to(installed).with_suffix("").parts).removesuffix(".__init__")
        for file in installed.rglob("*.py")
        if file.stem != "__main__"
    )
    assert {"unified", "unified_agent", "unified_master"} <= set(modules)
    code = (
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "import unified, unified_agent, unified_master; print(unified.__file__)"
    )
    assert python(code, [installed, dependencies()], tmp_path) == str(installed / "unified/__init__.py")


def test_commands_of_the_wheel_exist(installed: Path, tmp_path: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read(next(installed.glob("*.dist-info/entry_points.txt")))
    assert set(entry_points["console_scripts"]) == {"unified", "unified-master", "unified-agent"}
    for target in entry_points["console_scripts"].values():
        module, function = target.split(":")
        code = f"from {module} import {function}; print(callable({function}))"
        assert python(code, [installed, dependencies()], tmp_path) == "True"


def test_wheel_holds_our_packages_and_no_tool_settings(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"unified", "unified_agent", "unified_master"}
    assert not [name for name in names if name.endswith(("ruff.toml", ".pyc"))]
    assert "unified/py.typed" in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_a_users_own_agent_and_master_win_over_our_folders(tmp_path: Path) -> None:
    """Even with our checkout earlier on the path, as in `PYTHONPATH=.`."""
    user = tmp_path / "user"
    (user / "master").mkdir(parents=True)
    (user / "agent.py").write_text("whose = 'user'\n")
    (user / "master" / "__init__.py").write_text("whose = 'user'\n")
    code = "import agent, master; print(agent.whose, master.whose)"
    assert python(code, [ROOT, user], tmp_path) == "user user"
