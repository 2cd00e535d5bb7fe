"""Imports point down and in no cycle, cores are pure, and importing our package loads nothing heavy."""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORES = [
    *("unified.core", "unified.coordinator.core", "unified.elastic.core", "unified.queue.core", "unified.rounds.core"),
    *("unified.snapshot.core", "unified_agent.core", "unified_master.core"),
]
PACKAGES = {
    "unified": ROOT,
    "unified_agent": ROOT / "agent",
    "unified_gateway": ROOT / "gateway",
    "unified_master": ROOT / "master",
    "unified_simulator": ROOT / "simulator",
}
MODULES = {
    ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): file
    for package, base in PACKAGES.items()
    for file in sorted((base / package).rglob("*.py"))
}
IMPURE = {"asyncio", "multiprocessing", "psutil", "socket", "sqlite3", "ssl", "subprocess", "zmq"}
HEAVY = {"numpy", "omegaconf", "pydantic", "rich", "torch", "typer", "zmq"}


def loaded_by(*modules: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after importing these, less those it began with."""
    code = (
        "import importlib, json, sys; before = set(sys.modules)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_imports_point_down() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def imports() -> dict[str, set[str]]:
    """Modules of ours that each of our modules imports: at the top, in a function or under TYPE_CHECKING."""
    found: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{each.name}" for each in node.names}
                names |= (inner & MODULES.keys()) | ({node.module} if inner - MODULES.keys() else set())
        found[module] = names & MODULES.keys() - {module}
    return found


def test_no_imports_go_in_a_cycle() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(f"put what they need below them: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", CORES)
def test_core_loads_nothing_that_does_io(package: str) -> None:
    modules = [module for module in MODULES if f"{module}.".startswith(f"{package}.")]
    assert modules, f"{package} was not found"
    assert not loaded_by(*modules) & (IMPURE | HEAVY)


def test_every_core_is_kept_pure_by_ruff() -> None:
    for package in CORES:
        base = MODULES[package].parent
        assert "TID251" in (base / "ruff.toml").read_text(), f"{base}/ruff.toml bans nothing"


@pytest.mark.parametrize("package", ["unified", "unified.job", "unified.api.builder", "unified.api.runtime"])
def test_importing_what_users_import_loads_nothing_heavy(package: str) -> None:
    assert not loaded_by(package) & HEAVY


@pytest.mark.parametrize("daemon", ["unified_master", "unified_agent"])
def test_daemons_load_no_framework(daemon: str) -> None:
    assert not loaded_by(f"{daemon}.cli", f"{daemon}.daemon") & {"numpy", "omegaconf", "pydantic", "torch"}


@pytest.mark.parametrize("folder", ["agent", "gateway", "master", "simulator"])
def test_folders_that_hold_a_package_are_no_packages(folder: str) -> None:
    """With an `__init__.py` our folder would shadow a user's own agent.py or master/."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert [entry.name for entry in (ROOT / folder).iterdir() if entry.is_dir()] == [f"unified_{folder}"]
