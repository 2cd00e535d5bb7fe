"""The ways that `docs/architecture.md` follows file by file are those of the code, and no longer than they may be."""

import ast
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.support.bus import World, entry
from tests.support.file_trace import ROOT, FileTrace
from tests.support.master import Bench, elastic
from tests.support.runtime import InstantBus, worker_of
from unified.api.runtime import RoleGroup, rpc
from unified.checkpoint import CheckpointManager
from unified.worker.context import set_current_worker

PAGE = (ROOT / "docs/architecture.md").read_text()
HEADINGS = re.findall(r"^#+ (.+)\n(?:(?!\d+\. |#).*\n)*1\. `[\w/]+\.py`", PAGE, re.MULTILINE)
"""Those above a numbered list of files."""


def listed(heading: str) -> list[str]:
    """The files of the numbered list below a heading, in order."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


def listed_functions(heading: str) -> list[tuple[str, str]]:
    """Files of a list with the function, method or record that stands first behind each."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", section, re.MULTILINE)


def defined(file: str) -> set[str]:
    """Qualified names of the functions, methods and classes of a file."""
    found: set[str] = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def module(file: str) -> str:
    return file.removeprefix("agent/").removeprefix("master/").removesuffix(".py").replace("/", ".")


@cache
def imported(file: str) -> set[str]:
    """Modules that a file imports, at the top, in a function or for types, or names as ``"module:function"``."""
    text = (ROOT / file).read_text()
    found = set(re.findall(r'"(unified[\w.]+):\w+"', text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


@pytest.fixture
def trace() -> Iterator[FileTrace]:
    trace = FileTrace("bus-io")
    yield trace
    trace.close()


@pytest.mark.parametrize(
    ("argument", "headings", "limit"),
    [(5, ["A small call, file by file"], 24), (np.ones(100_000), ["A small call, file by file", "With an array"], 34)],
    ids=["small", "array"],
)
def test_a_call_crosses_the_files_that_the_page_lists(
    trace: FileTrace, tmp_path: Path, argument: object, headings: list[str], limit: int
) -> None:
    @rpc(inline=True)  # without it one more file: the pool of `executor.py`
    def handle(value: object) -> None:
        trace.is_on = False

    world = World(tmp_path, "auto", "")
    worker = worker_of(InstantBus(), caller=1, callee=1)
    (callee,) = worker.workers_of("callee")
    worker.bus, _ = world.endpoint(worker.actor_info.name)
    _, inbox = world.endpoint(callee.name, {"handle": handle})
    worker.bus.update_directory([entry(callee.name, inbox)])
    set_current_worker(worker)
    try:
        group = RoleGroup("callee")
        group.call("handle", argument).result(100)  # the first one makes the connection
        with trace.here():
            future = group.call("handle", argument)
        future.result(100)
    finally:
        set_current_worker(None)
        world.close()
    files = {file for heading in headings for file in listed(heading)}
    assert set(trace.files) == files
    assert len(files) <= limit


def test_a_save_crosses_the_files_that_the_page_lists(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"weight": torch.ones(1000)}
    with CheckpointManager(tmp_path) as manager, closing(FileTrace("checkpoint-")) as trace:
        manager.save(state, step=1)  # the first one imports
        manager.wait()
        with trace.here():
            manager.save(state, step=1)
        manager.wait()
    files = listed("A checkpoint save, file by file")
    assert set(trace.files) == set(files)
    assert len(files) <= 20


@pytest.mark.parametrize("heading", [*HEADINGS])
def test_each_listed_file_is_imported_by_one_above_it(heading: str) -> None:
    files = listed(heading)
    above = listed("A small call, file by file") if heading == "With an array" else []
    assert len(files) >= 3
    for index, file in enumerate(files):
        assert (ROOT / file).is_file(), f"{file} is not there"
        if above or index:
            found = {name for each in [*above, *files[:index]] for name in imported(each)}
            assert module(file) in found, f"none of the files above {file} imports it"


@pytest.mark.parametrize(
    ("places", "limit"),
    [(["driver", "master", "agent", "worker"], 36), (["rank", "snapshot servers"], 11)],
    ids=["job", "snapshot"],
)
def test_functions_of_the_page_are_in_few_files(places: list[str], limit: int) -> None:
    steps = [step for place in places for step in listed_functions(f"In the {place}")]
    assert len(steps) == sum(len(listed(f"In the {place}")) for place in places) >= 11
    assert [(file, name) for file, name in steps if name not in defined(file)] == []
    assert len({file for file, _ in steps}) <= limit


def test_a_lost_node_passes_the_functions_that_the_page_lists() -> None:
    bench = Bench(elastic(total=2, per_group=1, accelerator=8), nodes=3)
    lost = bench.worker("e", 1).node
    with closing(FileTrace("no other thread")) as trace, trace.here():
        bench.world.kill_agent(lost)
        bench.world.until(lambda: bench.worker("e", 1).node != lost, "a new place")
        bench.running()
    steps = listed_functions("A lost node, file by file")
    assert len(steps) == len(listed("A lost node, file by file")) <= 7
    assert [step for step in trace.functions if step in steps] == steps


def test_a_field_of_a_role_is_spelled_in_few_files() -> None:
    """In the description, its record, the builder, and where it is of use; what carries it copies all fields."""
    product = [file for tree in ("unified", "agent", "master", "gateway") for file in (ROOT / tree).rglob("*.py")]
    found = [file for file in product if re.search(r"\bper_node_max_failure\b", file.read_text())]
    assert 3 < len(found) <= 6, found


def test_few_places_cannot_be_guessed_from_the_names_of_files() -> None:
    _, _, *rows = PAGE.partition("## Where is …?\n\n")[2].partition("\n\n")[0].splitlines()
    assert 10 < len(rows) <= 30
