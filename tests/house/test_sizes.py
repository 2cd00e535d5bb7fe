"""Sizes: ceilings of packages, and alarms for files, folders and constructors, which a sentence may answer."""

import ast
import tomllib
from collections import Counter
from collections.abc import Set as AbstractSet
from pathlib import Path

ROOT = Path(__file__).parents[2]
CEILINGS = Path(__file__).with_name("ceilings.toml")
SLACK = 0.03
"""Part of a ceiling that may be free: below it, the number in the file goes down in the same commit."""
LINES = 500
"""Lines of a file above which it has to say what its one subject is."""
TREES = ["unified", "agent", "master", "gateway", "simulator", "tests", "examples", "benchmarks", "docs"]
LONG_FILES = {
    "agent/unified_agent/core/agent.py": "one `match` over all events of the agent, with what each does",
    "agent/unified_agent/processes.py": "one owner of child processes: starts, words, signals and ends meet in a table",
    "master/unified_master/core/state.py": "the records of the master's state, which refer to each other",
    "master/unified_master/daemon.py": "one loop, with the sockets and the file that it owns",
    "simulator/unified_simulator/cluster.py": "the shell around the master's core, and the network to its agents",
    "tests/cluster/test_failure_table.py": "one case for each row of one page",
    "tests/io/client/test_client_watch.py": "all that the display of one running job says",
    "tests/unit/master/core/test_client_requests.py": "one request of a client after the other",
    "unified/bus/transport/unix_connection.py": "both directions of a connection share its lock, limits and end",
    "unified/client/connection.py": "one connection: requests, repetition, watching and reconnecting share its thread",
    "unified/client/logs.py": "the reader of logs: each of its parts is of use to it alone",
    "unified/protocol/client_master.py": "all messages of one conversation",
}
"""The one subject of each file that is longer."""
SMALLEST = 40
NAMED = {
    "unified/api/runtime/queue.py",  # a path of the reference documents, as the next two
    "unified/api/runtime/rpc_helper.py",
    "unified/api/runtime/worker.py",
    "unified/compat/dtruntime.py",  # modules that an import of that name finds
    "unified/compat/stand_in/dlrover.py",
    "unified/compat/stand_in/dtruntime.py",
    "unified/compat/upstream/log.py",
    "unified/integrations/transformers.py",  # imports a library that few have, as its sibling does
    "unified/bus/buffers.py",  # a leaf that must load no ctypes
    "unified/core/backoff.py",
    "unified/values.py",
}
"""Modules of less than `SMALLEST` lines that have a reason."""
MODULES = 20
"""Modules of a folder above which it has to say what they have in common."""
LARGE_FOLDERS = {
    "unified/cli": "a module for each command",
    "unified/client": "what a program outside of a cluster does with it, or with a cluster of its own",
    "unified/training": "the program of a run: its frameworks, and what they share",
}
PARAMETERS = 8
LONG_CONSTRUCTORS = {
    "ShardedDataset": 9,
}


def product() -> list[Path]:
    return [
        file
        for tree in ("unified", "agent", "master", "gateway", "simulator")
        for file in sorted((ROOT / tree).rglob("*.py"))
    ]


def check(found: AbstractSet[str], answered: AbstractSet[str], limit: str) -> None:
    """Hold a table of answers to what is there: an alarm without an answer fails, and so does one for nothing."""
    assert found <= answered, f"{limit}: {sorted(found - answered)}; split it, or say in a sentence why it is one thing"
    assert answered <= found, f"take out of the table: {sorted(answered - found)}"


def package_of(file: Path) -> str:
    """Package that the ceiling of a module is for: a folder of `unified/`, or another tree as a whole."""
    tree, *rest = file.relative_to(ROOT).parts
    return f"{tree}/{rest[0]}" if tree == "unified" and len(rest) > 1 else tree


def test_packages_are_below_their_ceilings() -> None:
    ceilings = tomllib.loads(CEILINGS.read_text())["lines"]
    lines = Counter[str]()
    for file in product():
        lines[package_of(file)] += len(file.read_text().splitlines())
    assert lines.keys() == ceilings.keys(), f"{CEILINGS.name} and the packages differ"
    above = {name: (number, ceilings[name]) for name, number in lines.items() if number > ceilings[name]}
    assert not above, f"(lines, ceiling): {above}: take lines out, or say in the commit what the new ones are for"
    below = {name: number for name, number in lines.items() if number < (1 - SLACK) * ceilings[name]}
    assert not below, f"lower the ceilings in {CEILINGS.name} to {below}"


def test_a_long_file_says_what_its_one_subject_is() -> None:
    found = {
        str(file.relative_to(ROOT))
        for tree in TREES
        for file in (ROOT / tree).rglob("*.py")
        if len(file.read_text().splitlines()) > LINES
    }
    check(found, LONG_FILES.keys(), f"more than {LINES} lines")


def test_no_module_is_smaller_than_a_page() -> None:
    small = {
        str(file.relative_to(ROOT))
        for file in product()
        if file.name not in ("__init__.py", "__main__.py") and len(file.read_text().splitlines()) < SMALLEST
    }
    new, gone = sorted(small - NAMED), sorted(NAMED - small)
    assert not new, f"less than {SMALLEST} lines, so that they belong into another module: {new}"
    assert not gone, f"take out of NAMED, for they have grown or gone: {gone}"


def test_a_large_folder_says_what_its_modules_have_in_common() -> None:
    number = Counter(str(file.parent.relative_to(ROOT)) for file in product() if file.name != "__init__.py")
    found = {name for name, count in number.items() if count > MODULES}
    check(found, LARGE_FOLDERS.keys(), f"more than {MODULES} modules")


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
    assert found == LONG_CONSTRUCTORS, f"a constructor has at most {PARAMETERS} parameters"
