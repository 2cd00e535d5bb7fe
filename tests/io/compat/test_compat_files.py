"""`python -m unified.compat`, and real packages of upstream's names on disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

BUILDER = "dlrover.python.unified.api.builder"
PRINTS_ITSELF = """
import sys, pickle, pathlib
from dlrover.python.unified.api.builder import DLJobBuilder
class Thing: pass
pickle.loads(pickle.dumps(Thing()))
print(__name__, sys.argv, pathlib.Path(__file__).name, sys.path[0], DLJobBuilder.__module__)
"""


def python(*arguments: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, without what this one's environment says about aliases."""
    inherited = {name: value for name, value in os.environ.items() if name != "UNIFIED_COMPAT"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**inherited, **env},
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    file = folder / "train.py"
    file.write_text(PRINTS_ITSELF)
    return file


@pytest.fixture
def real(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    for package in ("", "python", "python/common", "python/unified", "python/unified/api", "python/unified/common"):
        (folder / f"dlrover/{package}").mkdir(parents=True)
        (folder / f"dlrover/{package}/__init__.py").touch()
    (folder / "dtruntime").mkdir()
    for file, name in {
        "dlrover/python/unified/api/builder": "DLJobBuilder",
        "dlrover/python/unified/api/extra": "Extra",
        "dlrover/python/unified/common/constant": "RAY_HANG_CHECK_INTERVAL",
        "dlrover/python/common/log": "default_logger",
        "dlrover/python/unified/controller": "Controller",
        "dtruntime/__init__": "DatasetRegistry",
        "dtruntime/_core": "Core",
    }.items():
        (folder / f"{file}.py").write_text(f"{name} = 'the real one'")
    return folder


def test_script_runs_as_python_would_run_it(script: Path, tmp_path: Path) -> None:
    done = python("-m", "unified.compat", "scripts/train.py", "--lr", "1", "--force", cwd=tmp_path)
    assert done.stdout == (
        f"__main__ ['scripts/train.py', '--lr', '1', '--force'] train.py {script.parent} unified.api.builder.builder\n"
    ), done.stderr
    assert done.stderr == ""
    assert done.returncode == 0


def test_script_imports_what_lies_beside_it(script: Path, tmp_path: Path) -> None:
    (script.parent / "beside.py").write_text(f"from {BUILDER} import DLJobBuilder")
    script.write_text("import beside; print(beside.DLJobBuilder.__name__)")
    assert python("-m", "unified.compat", script, cwd=tmp_path).stdout == "DLJobBuilder\n"


@pytest.mark.parametrize(("end", "code"), [("import sys; sys.exit(7)", 7), ("1 / 0", 1), ("this is no Python", 1)])
def test_exit_code_is_the_scripts(script: Path, tmp_path: Path, end: str, code: int) -> None:
    script.write_text(end)
    done = python("-m", "unified.compat", script, cwd=tmp_path)
    assert done.returncode == code
    assert ("train.py" in done.stderr) == (code == 1), "a traceback names the script"


def test_script_that_is_not_there(tmp_path: Path) -> None:
    done = python("-m", "unified.compat", "nothing.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "unified.compat: nothing.py cannot be read: No such file or directory.\n",
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of a package with a module that can be run, and one for the package itself."""
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "beside.py").touch()
    for name in ("train", "__main__"):
        (folder / f"{name}.py").write_text("from . import beside; print(__spec__.name, __package__)" + PRINTS_ITSELF)
    return folder


@pytest.mark.parametrize(("module", "file"), [("pkg.train", "train.py"), ("pkg", "__main__.py")])
def test_module_runs_as_python_would_run_it(package: Path, tmp_path: Path, module: str, file: str) -> None:
    name = f"pkg.{file.removesuffix('.py')}"
    done = python("-m", "unified.compat", "-m", module, "--lr", "1", "-m", cwd=tmp_path)
    assert done.stdout == (
        f"{name} pkg\n__main__ ['{package / file}', '--lr', '1', '-m'] {file} {tmp_path} unified.api.builder.builder\n"
    ), done.stderr
    assert (done.stderr, done.returncode) == ("", 0)


def test_module_that_multiprocessing_spawns_is_found_again(package: Path, tmp_path: Path) -> None:
    (package / "train.py").write_text(
        f"import multiprocessing; from {BUILDER} import DLJobBuilder\n"
        "def work(): print(__name__, __spec__.name, DLJobBuilder.__module__)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work); process.start(); process.join()\n"
    )
    done = python("-m", "unified.compat", "-m", "pkg.train", cwd=tmp_path)
    assert done.stdout == "__mp_main__ pkg.train unified.api.builder.builder\n", done.stderr


@pytest.mark.parametrize(("module", "said"), [("pkg.nothing", "no module pkg.nothing"), ("none.at.all", "'none'")])
def test_module_that_is_not_there(package: Path, tmp_path: Path, module: str, said: str) -> None:
    done = python("-m", "unified.compat", "-m", module, cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_modules_of_upstream_that_are_run(tmp_path: Path) -> None:
    done = python("-m", "unified.compat", "-m", "dlrover.python.unified.driver.main", "{}", cwd=tmp_path)
    assert done.returncode == 1
    assert "DescriptionError: job_name is missing: it has to be given.\ndl_config is missing" in done.stderr


def test_without_a_script_it_says_how(tmp_path: Path) -> None:
    done = python("-m", "unified.compat", cwd=tmp_path)
    assert done.returncode == 2
    assert "SCRIPT.py" in done.stderr


@pytest.mark.parametrize(("value", "works"), [("1", True), ("force", True), ("0", False), ("", False)])
def test_variable_makes_import_unified_bring_the_aliases(tmp_path: Path, value: str, works: bool) -> None:
    code = f"import unified; from {BUILDER} import DLJobBuilder"
    done = python("-c", code, cwd=tmp_path, UNIFIED_COMPAT=value)
    assert (done.returncode == 0) == works, done.stderr


def test_variable_that_says_nothing_is_told(tmp_path: Path) -> None:
    done = python("-c", "import unified", cwd=tmp_path, UNIFIED_COMPAT="yes please")
    assert "UNIFIED_COMPAT='yes please' is none of 1, 0 and force." in done.stderr


def test_aliases_cost_no_heavy_import(tmp_path: Path) -> None:
    code = f"import sys, unified; from {BUILDER} import DLJobBuilder; import dtruntime; print(*sorted(sys.modules))"
    loaded = set(python("-c", code, cwd=tmp_path, UNIFIED_COMPAT="1").stdout.split())
    assert "unified.compat.dtruntime" in loaded
    assert not loaded & {"torch", "numpy", "pyarrow", "boto3", "zmq", "unified.data", "unified.checkpoint"}


# Real packages


BOTH = f"import unified, dtruntime; from {BUILDER} import DLJobBuilder; print(dtruntime.__name__, DLJobBuilder)"


def test_real_packages_are_never_shadowed(real: Path, tmp_path: Path) -> None:
    code = (
        f"import unified, dtruntime; from {BUILDER} import DLJobBuilder; print(DLJobBuilder, dtruntime.DatasetRegistry)"
    )
    done = python("-c", code, cwd=tmp_path, UNIFIED_COMPAT="1", PYTHONPATH=str(real))
    assert done.stdout == "the real one the real one\n", done.stderr


def test_real_packages_are_shadowed_when_asked(real: Path, tmp_path: Path) -> None:
    done = python("-c", BOTH, cwd=tmp_path, UNIFIED_COMPAT="force", PYTHONPATH=str(real))
    assert done.stdout == ("unified.compat.dtruntime <class 'unified.api.builder.builder.DLJobBuilder'>\n"), done.stderr


def test_what_else_a_real_package_has_stays_when_it_is_shadowed(real: Path, tmp_path: Path) -> None:
    code = f"import unified; from {BUILDER} import DLJobBuilder; from dlrover.python.unified import controller as c; "
    done = python("-c", code + "print(c.Controller)", cwd=tmp_path, UNIFIED_COMPAT="force", PYTHONPATH=str(real))
    assert done.stdout == "the real one\n", done.stderr


@pytest.mark.parametrize(
    "what",
    [
        "dlrover.python.unified.api.extra import Extra",  # below a module that is an alias
        "dlrover.python.unified.common.constant import RAY_HANG_CHECK_INTERVAL",  # beside names that are ours
        "dlrover.python.common.log import default_logger",
        "dtruntime._core import Core",
    ],
)
def test_each_module_and_name_of_a_real_package_that_is_not_ours_stays(real: Path, tmp_path: Path, what: str) -> None:
    code = f"import unified, dtruntime; from {BUILDER} import DLJobBuilder; from {what} as found; "
    code += "from dlrover.python.unified.common.constant import DLWorkloadEnv; print(dtruntime.__name__, found)"
    done = python("-c", code, cwd=tmp_path, UNIFIED_COMPAT="force", PYTHONPATH=str(real))
    assert done.stdout == "unified.compat.dtruntime the real one\n", done.stderr


def test_real_packages_are_not_shadowed_in_children(real: Path, script: Path, tmp_path: Path) -> None:
    """Those that are where Python looks last, too."""
    script.write_text(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True); {BOTH}"
    )
    child = f"import sys; sys.path.append({str(real)!r}); {BOTH}"
    for flags, told in (((), "the real one"), (("--force",), "DLJobBuilder'>")):
        done = python("-m", "unified.compat", *flags, script, child, cwd=tmp_path, PYTHONPATH=str(real))
        assert done.stdout.count(told) == 2, done.stdout + done.stderr
        done = python("-m", "unified.compat", *flags, script, child, cwd=tmp_path)
        assert done.stdout.splitlines()[0].endswith(told), done.stderr


def test_command_says_that_a_real_package_is_used(script: Path, real: Path, tmp_path: Path) -> None:
    script.write_text(f"from {BUILDER} import DLJobBuilder; print(DLJobBuilder)")
    given = python("-m", "unified.compat", script, cwd=tmp_path, PYTHONPATH=str(real))
    assert given.stdout == "the real one\n"
    assert f"dlrover is installed ({real}/dlrover/__init__.py) and is used; --force" in given.stderr
    forced = python("-m", "unified.compat", "--force", script, cwd=tmp_path, PYTHONPATH=str(real))
    assert (forced.stdout, forced.stderr) == ("<class 'unified.api.builder.builder.DLJobBuilder'>\n", "")


def test_folder_that_happens_to_have_the_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "dtruntime").mkdir()
    (tmp_path / "dlrover").mkdir()
    (tmp_path / "dlrover/mine.py").write_text("VALUE = 3")
    code = f"{BOTH}; import dlrover.mine; print(dlrover.mine.VALUE)"
    done = python("-c", code, cwd=tmp_path, UNIFIED_COMPAT="1")
    assert done.stdout == ("unified.compat.dtruntime <class 'unified.api.builder.builder.DLJobBuilder'>\n3\n"), (
        done.stderr
    )
