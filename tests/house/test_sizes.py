"""Limits of files, folders and constructors: above one it is two things, far below it a part of one."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 600
TREES = ["unified", "agent", "master", "gateway", "unified_simulator", "tests", "examples", "benchmarks", "docs"]
EXCEPTIONS: dict[str, int] = {}
"""Path to the number of lines it may have. Entries may shrink or go, never grow or come. So in all tables below."""
SMALLEST = 40
NAMED = {
    "unified/api/runtime/queue.py",  # a path of the reference documents, as the next two
    "unified/api/runtime/rpc_helper.py",
    "unified/api/runtime/worker.py",
    "unified/compat/dtruntime.py",  # modules that an import of that name finds
    "unified/compat/stand_in/dlrover.py",
    "unified/compat/stand_in/dtruntime.py",
    "unified/compat/upstream/log.py",
    "unified/bus/buffers.py",  # a leaf that must load no ctypes
    "unified/core/backoff.py",
    "unified/values.py",
}
"""Modules of less than `SMALLEST` lines that have a reason."""
MODULES = 22
LARGE_FOLDERS: dict[str, int] = {}
PARAMETERS = 8
LONG_CONSTRUCTORS = {
    "ShardedDataset": 9,
}


def product() -> list[Path]:
    return [
        file
        for tree in ("unified", "agent", "master", "gateway", "unified_simulator")
        for file in sorted((ROOT / tree).rglob("*.py"))
    ]


def check(found: dict[str, int], table: dict[str, int], name: str, limit: str) -> None:
    """Hold a table of exceptions to what is there: nothing new, nothing more, and nothing that is no longer so."""
    worse = {path: number for path, number in found.items() if number > table.get(path, 0)}
    assert not worse, f"{limit}: {worse}"
    assert found == table, f"there is less than {name} of {Path(__file__).name} allows: make it {found}"


def test_no_file_is_longer_than_one_sitting() -> None:
    lines = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for tree in TREES
        for file in (ROOT / tree).rglob("*.py")
    }
    found = {name: number for name, number in lines.items() if number > LIMIT}
    check(found, EXCEPTIONS, "EXCEPTIONS", f"a file has at most {LIMIT} lines")


def test_no_module_is_smaller_than_a_page() -> None:
    small = {
        str(file.relative_to(ROOT))
        for file in product()
        if file.name not in ("__init__.py", "__main__.py") and len(file.read_text().splitlines()) < SMALLEST
    }
    new, gone = sorted(small - NAMED), sorted(NAMED - small)
    assert not new, f"less than {SMALLEST} lines, so that they belong into another module: {new}"
    assert not gone, f"take out of NAMED, for they have grown or gone: {gone}"


def test_no_folder_has_too_many_modules() -> None:
    number = Counter(str(file.parent.relative_to(ROOT)) for file in product() if file.name != "__init__.py")
    found = {name: count for name, count in number.items() if count > MODULES}
    check(found, LARGE_FOLDERS, "LARGE_FOLDERS", f"a folder has at most {MODULES} modules")


def test_no_constructor_has_too_many_parameters() -> None:
    found = {}
    for file in product():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        given = method.args
                        number = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                        if number > PARAMETERS:
                            found[node.name] = number
    check(found, LONG_CONSTRUCTORS, "LONG_CONSTRUCTORS", f"a constructor has at most {PARAMETERS} parameters")
