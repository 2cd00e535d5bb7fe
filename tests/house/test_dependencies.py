"""What is imported is declared, by the distribution that has it and not by one that brings it; and the reverse."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "unified": ROOT / "unified",
    "unified_agent": ROOT / "agent",
    "unified_gateway": ROOT / "gateway",
    "unified_master": ROOT / "master",
    "unified_simulator": ROOT / "simulator",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"test", "examples", "training", "browser"}
NOT_YET: set[str] = set()
"""Extras that docs/concepts.md lists as missing; see pyproject.toml."""
ASKED_FOR = {"agent/unified_agent/measure/metrics.py": {"prometheus_client"}}
"""Modules of daemons that an option alone loads, and what they need of an extra."""
OF_ITS_CALLER = {"unified/testing.py": {"pytest"}}
"""A plugin is imported by what it is a plugin of."""


COMMANDS = {"memray", "py-spy"}
"""Of the extra for debugging: people and agents run them, and nothing imports them."""
IN_NAMESPACE = {"backports": "backports.zstd", "mlflow": "mlflow-skinny"}
"""The distribution of a module, where it need not be installed to be told."""
STANDARD = sys.stdlib_module_names | {"annotationlib", "compression"}
"""Of the newest Python, whichever runs this."""


OF_VLLM = "unified/engine/vllm_plugin/"
"""A plugin that runs in the environment of vLLM."""


@cache
def imported() -> Sequence[tuple[str, str]]:
    return [*_imported()]


def _imported() -> Iterator[tuple[str, str]]:
    """Each file, and a module outside the standard library that it imports, anywhere in it."""
    for package, folder in PACKAGES.items():
        for file in sorted((folder / package if folder.name != package else folder).rglob("*.py")):
            where = str(file.relative_to(ROOT))
            if where.startswith(OF_VLLM):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                    names = [node.module]
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                    texts = [
                        each.value for arg in node.args[:1] for each in ast.walk(arg) if isinstance(each, ast.Constant)
                    ]
                    names = [text for text in texts if isinstance(text, str)]
                for name in filter(None, names):
                    top = name.partition(".")[0]
                    if top not in STANDARD | PACKAGES.keys() | OF_ITS_CALLER.get(where, set()):
                        yield where, top


def declared(*extras: str) -> set[str]:
    """Names of the distributions that the core, or these extras, need."""
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras] or [PROJECT["dependencies"]]
    names = {re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for each in lists for text in each}
    return {normal(name) for name in names} - {PROJECT["name"], "unified-simulator"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def having() -> Mapping[str, Sequence[str]]:
    return packages_distributions()


def distributions(module: str) -> set[str]:
    return {normal(name) for name in having().get(module, [IN_NAMESPACE.get(module, module)])}


USED = [*PROJECT["optional-dependencies"].keys() - FOR_DEVELOPERS - NOT_YET]


def test_what_is_imported_is_declared() -> None:
    known = declared() | declared(*USED)
    missing = {f"{where} imports {module}" for where, module in imported() if not distributions(module) & known}
    assert not missing


def test_what_is_declared_is_imported() -> None:
    used = {name for _, module in imported() for name in distributions(module)}
    assert not (declared() | declared(*USED)) - used - COMMANDS


def test_daemons_need_the_core_alone() -> None:
    daemons = {
        module
        for where, module in imported()
        if where.startswith(("agent/", "master/")) and module not in ASKED_FOR.get(where, set())
    }
    assert not {module for module in daemons if not distributions(module) & declared()}
