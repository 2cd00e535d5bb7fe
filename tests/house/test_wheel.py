"""What a user installs is whole, and leaves the user's own module names alone."""

import configparser
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=100,
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
        if file.stem != "__main__" and "vllm_plugin" not in file.parts  # which runs in the environment of vLLM
    )
    assert {"unified", "unified_agent", "unified_gateway", "unified_master"} <= set(modules)
    code = f"""
import importlib
from unified.lazy import EXTRA_OF
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # the extras hf and nemo are not always here
        if EXTRA_OF.get(error.name) not in ("hf", "nemo"):
            raise
import unified, unified_agent, unified_master
print(unified.__file__)
"""
    assert python(code, [installed, dependencies()], tmp_path) == str(installed / "unified/__init__.py")


def test_commands_of_the_wheel_exist(installed: Path, tmp_path: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read(next(installed.glob("*.dist-info/entry_points.txt")))
    commands = {"unified", "unified-master", "unified-agent", "unified-gateway", "unified-train"}
    assert set(entry_points["console_scripts"]) == commands
    for target in entry_points["console_scripts"].values():
        module, function = target.split(":")
        code = f"from {module} import {function}; print(callable({function}))"
        assert python(code, [installed, dependencies()], tmp_path) == "True"


def test_wheel_holds_our_packages_and_no_tool_settings(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"unified", "unified_agent", "unified_gateway", "unified_master", "unified_compat.pth"}
    assert not [name for name in names if name.endswith(("ruff.toml", ".pyc"))]
    assert "unified/py.typed" in names
    page = ROOT / "gateway/unified_gateway/static"
    files = {path.relative_to(page.parents[1]).as_posix() for path in page.rglob("*") if path.is_file()}
    assert files <= set(names)
    assert [name for name in names if name.endswith("licenses/LICENSE")]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with the wheel, and with what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(f"{dependencies()}\n")
    return folder / "bin/python"


UPSTREAMS_ALONE = "from dlrover.python.unified.api.builder import DLJobBuilder; import dtruntime; print(DLJobBuilder)"


@pytest.mark.parametrize(("value", "works"), [("1", True), ("force", True), ("0", False), (None, False)])
def test_variable_is_enough_for_a_script_of_upstream(
    environment: Path, tmp_path: Path, value: str | None, works: bool
) -> None:
    """`UNIFIED_COMPAT=1 python script.py`, where the script imports nothing of `unified`."""
    (tmp_path / "script.py").write_text(UPSTREAMS_ALONE)
    env = {name: text for name, text in os.environ.items() if name not in ("UNIFIED_COMPAT", "PYTHONPATH")}
    env |= {} if value is None else {"UNIFIED_COMPAT": value}
    done = subprocess.run([environment, tmp_path / "script.py"], capture_output=True, text=True, env=env, cwd=tmp_path)
    if works:
        assert done.stdout == "<class 'unified.api.builder.builder.DLJobBuilder'>\n", done.stderr
    else:
        assert "No module named 'dlrover'" in done.stderr


def test_without_the_variable_an_interpreter_loads_nothing_of_ours(environment: Path, tmp_path: Path) -> None:
    env = {name: text for name, text in os.environ.items() if name not in ("UNIFIED_COMPAT", "PYTHONPATH")}
    code = "import sys; print([name for name in sys.modules if name.startswith('unified')])"
    done = subprocess.run([environment, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_editable_install_has_it_too(tmp_path: Path) -> None:
    code = f"import hatchling.build; print(hatchling.build.build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    names = zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).namelist()
    assert "unified_compat.pth" in names
    assert max(name for name in names if name.endswith(".pth")) == "unified_compat.pth", "read after our folders"


def test_a_users_own_agent_and_master_win_over_our_folders(tmp_path: Path) -> None:
    """Even with our checkout earlier on the path, as in `PYTHONPATH=.`."""
    user = tmp_path / "user"
    (user / "master").mkdir(parents=True)
    (user / "agent.py").write_text("whose = 'user'\n")
    (user / "master" / "__init__.py").write_text("whose = 'user'\n")
    code = "import agent, master; print(agent.whose, master.whose)"
    assert python(code, [ROOT, user], tmp_path) == "user user"
