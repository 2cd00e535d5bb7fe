"""Names say something, and no class name means two things."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ROOT / "unified",
    ROOT / "agent/unified_agent",
    ROOT / "gateway/unified_gateway",
    ROOT / "master/unified_master",
    ROOT / "simulator",
]
SAY_NOTHING = {"api", "base", "common", "helper", "helpers", "impl", "manager", "misc", "types", "util", "utils"}
TECHNICAL_KINDS = {"classes", "enums", "interfaces", "models"}
ALLOWED = {ROOT / "unified/api"}  # `unified.api.builder` and `unified.api.runtime` are what users already import
OF_THE_DOCUMENTS = ("CheckpointManager", "ShardManager")  # names that users of the reference documents import
EMPTY_SUFFIXES = ("Manager", "Base", "Helper", "Util", "Utils", "Impl")


def sources() -> list[Path]:
    return [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]


@cache
def classes(file: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]


def test_no_module_or_folder_has_a_name_that_says_nothing() -> None:
    folders = {folder for file in sources() for folder in file.parents if ROOT in folder.parents}
    found = [path for path in [*sources(), *folders] if path.stem in SAY_NOTHING and path not in ALLOWED]
    assert not found
    assert not [folder for folder in folders if folder.name in TECHNICAL_KINDS]


def test_no_class_has_a_name_that_says_nothing() -> None:
    found = [f"{file.relative_to(ROOT)}: {name}" for file in sources() for name in classes(file)]
    found = [line for line in found if not line.endswith(OF_THE_DOCUMENTS)]
    assert not [line for line in found if line.endswith(EMPTY_SUFFIXES)]


def test_a_class_name_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in sources():
        for name in classes(file):
            homes[name.lstrip("_")].append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}
