"""The ways that `docs/architecture.md` follows file by file are those of the code, and no longer than they may be."""

import ast
import importlib
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from tests.support.bus import World, entry
from tests.support.file_trace import ROOT, FileTrace
from tests.support.master import Bench, elastic
from tests.support.runtime import ENTRY, InstantBus, launch_of, worker_of
from tests.support.snapshots import SECRET, SnapshotNode, SnapshotRank, SnapshotThread
from unified.api.runtime import RoleGroup, rpc
from unified.checkpoint import CheckpointManager
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.snapshots import token_of
from unified.rounds.rendezvous_store import RoundStores, connect
from unified.rounds.snapshot_agreement import RoundPlace
from unified.snapshot.worker.client import SnapshotClient
from unified.snapshot.worker.snapshots import Snapshots
from unified.testing import eventually
from unified.worker.context import Worker, set_current_worker

PAGE = (ROOT / "docs/architecture.md").read_text()
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
CORE = "master/unified_master/core/"
HEADINGS = re.findall(r"^#+ (.+)\n(?:(?!\d+\. |#).*\n)*1\. `[\w/]+\.py`", PAGE, re.MULTILINE)
"""Those above a numbered list of files."""


def section(heading: str) -> str:
    return re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def listed(heading: str) -> list[str]:
    """The files of the numbered list below a heading, in order."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section(heading), re.MULTILINE)


def listed_functions(heading: str) -> list[tuple[str, str]]:
    """Files of a list with the function, method or record that stands first behind each."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", section(heading), re.MULTILINE)


def named(text: str, folder: str = "") -> set[str]:
    """All files of the product that a text names, from the top or from a folder."""
    files = [file for file in re.findall(r"`([\w/]+\.py)`", text) if not file.startswith("tests/")]
    return {file if (ROOT / file).is_file() else folder + file for file in files}


def defined(file: str) -> set[str]:
    """Qualified names of the functions, methods and classes of a file."""
    found: set[str] = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS)}
    return found


def module(file: str) -> str:
    return re.sub("^(agent|master|gateway)/", "", file).removesuffix(".py").replace("/", ".")


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
    [
        (["driver", "master", "agent", "worker"], 36),
        (["rank", "snapshot servers"], 11),
        (["gateway", "ranks of the run"], 10),
    ],
    ids=["job", "snapshot", "run"],
)
def test_functions_of_the_page_are_in_few_files(places: list[str], limit: int) -> None:
    steps = [step for place in places for step in listed_functions(f"In the {place}")]
    assert len(steps) == sum(len(listed(f"In the {place}")) for place in places) >= 10
    assert [(file, name) for file, name in steps if name not in defined(file)] == []
    assert len({file for file, _ in steps}) <= limit


def test_a_snapshot_crosses_the_files_and_the_wires_that_the_page_lists(tmp_path: Path) -> None:
    """Compared are files of `unified/snapshot`, `rounds` and `tensors`: with the list, and the text before it.

    Rank 0 takes a snapshot on node `a`, its partner on `b` gets the copy, and rank 0 restores it on `c`. Ranks and
    servers are threads of this process, so that all connections are its own.
    """
    state = {"weights": pytest.importorskip("torch").ones(1000)}
    spec = JobSpec(name="job", roles=[RoleSpec(name="trainer", kind="elastic", entry_point=ENTRY, total=2)])
    stores = RoundStores("127.0.0.1", {})
    connected = partial(connect, "127.0.0.1", stores.port, 100.0)

    def worker(node: SnapshotNode, rank: int, round_: int) -> Worker:
        token = token_of(SECRET + node.node.encode(), "job-1")
        launch = launch_of(spec, rank, run_dir=str(node.run_dir), snapshot_token=token)
        place = RoundPlace("trainer", round_, rank, 2, connected, 100.0)
        made = worker_of(InstantBus(), trainer=2)
        made.__dict__["snapshots"] = Snapshots(launch, lambda: place)
        return made

    with closing(FileTrace(SnapshotThread.NAME)) as trace, ThreadPoolExecutor() as pool:
        a, b, c = (SnapshotThread(tmp_path, name) for name in "abc")
        ranks, later = [worker(a, 0, 1), worker(b, 1, 1)], [worker(c, 0, 2), worker(b, 1, 2)]
        before = set(psutil.Process().net_connections("all"))
        with trace.here():
            second = pool.submit(ranks[1].snapshot, state, 1)
            ranks[0].snapshot(state, 1)
            second.result(100)
            observer = SnapshotRank(b, 1)
            eventually(lambda: observer.steps(is_copy=True) == [(0, 1)])
            observer.client.close()
            also = pool.submit(later[1].restore)
            restored = later[0].restore()
            also.result(100)
        trace.is_on = False
        made = set(psutil.Process().net_connections("all")) - before
        for each in (*ranks, *later):
            cast(SnapshotClient, each.snapshots._client).close()
        assert [node.end() for node in (a, b, c)] == [0, 0, 0]
    assert restored is not None
    assert restored.source == "partner"
    packages = ("unified/snapshot/", "unified/rounds/", "unified/tensors/")
    way = {file for place in ("rank", "snapshot servers") for file in listed(f"In the {place}")}
    text = section("A snapshot, file by file")
    entered = {file for file in trace.files if file.startswith(packages)}
    assert entered == {file for file in way | named(text) if file.startswith(packages)}
    assert len([file for file in entered if file.startswith("unified/snapshot/")]) <= 11
    ports = {stores.port: "the store of the round"}
    ports |= {int(each.host.url.rpartition(":")[2]): "the sockets between servers" for each in (a, b, c)}
    kinds = {wire_of(each, ports) for each in made}
    wires = re.sub(r"\s+", " ", text).partition("crosses three wires: ")[2].partition(". ")[0].split("; ")
    assert len(kinds) == len(wires) == 3
    assert all(any(kind in wire for wire in wires) for kind in kinds), kinds


def wire_of(connection: Any, ports: dict[int, str]) -> str:
    """Name a connection of this process in the words of the page; one that the page does not have by what it is."""
    if connection.family is socket.AF_UNIX:
        is_known = connection.type is socket.SOCK_SEQPACKET  # the end of a worker has no name
        return "the socket of a worker to the server of its node" if is_known else str(connection)
    known = [ports[each.port] for each in (connection.laddr, connection.raddr) if each and each.port in ports]
    return known[0] if known else str(connection)


def lose_a_node(replaced: Callable[[], None] = lambda: None) -> tuple[FileTrace, list[str]]:
    """Lose a node of two, until its rank runs on a third; return the trace, and the reasons of all decisions.

    Args:
        replaced: called when the job runs, before the loss.
    """
    bench = Bench(elastic(total=2, per_group=1, accelerator=8), nodes=3)
    lost = bench.worker("e", 1).node
    replaced()
    with closing(FileTrace("no other thread")) as trace, trace.here():
        bench.world.kill_agent(lost)
        bench.world.until(lambda: bench.worker("e", 1).node != lost, "a new place")
        bench.running()
    return trace, [f"{each.at} {each.event}: {each.reason}" for each in bench.world.core.cluster.events["job-1"]]


def test_a_lost_node_passes_the_functions_that_the_page_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further file of the master's core that takes part has to be on the page, with what it does.

    Seven files are the way. The page names three others that decide within its steps, so ten decide in all.
    """
    heading = "A lost node, file by file"
    trace, reasons = lose_a_node()
    steps = listed_functions(heading)
    assert len(steps) == len(listed(heading)) <= 7
    assert [step for step in trace.functions if step in steps] == steps
    assert {file for file in trace.files if file.startswith(CORE)} == named(section(heading), CORE)

    (asked,) = re.findall(r"^- These are asked(?:.|\n  )*", section(heading), re.MULTILINE)
    functions = [
        getattr(importlib.import_module(module(file)), name)
        for file, name in trace.functions
        if file in named(asked, CORE) and "." not in name
    ]
    assert len(functions) >= len(named(asked, CORE))

    def remove() -> None:
        for each in functions:
            monkeypatch.setattr(each, "__code__", (lambda *_, **__: None).__code__)

    assert lose_a_node(remove)[1] == reasons


@pytest.mark.parametrize("field", ["per_node_max_failure", "auto_visible_devices", "rank_based_gpu_selection"])
def test_a_field_of_a_role_is_spelled_in_few_files(field: str) -> None:
    """Counted are files of the product that have the word, of fields whose word no other part uses: the description,
    its record, the builder, and where the field is of use. What carries it copies all fields.

    Not held: fields that are options of commands too (`max_restart`, `hang_timeout`), or that each process on the way
    has to know (`stop_grace_s`), are in more files.
    """
    product = [file for tree in ("unified", "agent", "master", "gateway") for file in (ROOT / tree).rglob("*.py")]
    found = [file for file in product if re.search(rf"\b{field}\b", file.read_text())]
    assert 3 < len(found) <= 6, found


def test_few_places_cannot_be_guessed_from_the_names_of_files() -> None:
    """At most 30, and each is there: from the top, or from a folder that its row has named before."""
    _, _, *rows = PAGE.partition("## Where is …?\n\n")[2].partition("\n\n")[0].splitlines()
    assert 10 < len(rows) <= 30
    for row in rows:
        folders = [ROOT]
        for name in re.findall(r"`([\w/]+(?:\.(?:py|js|proto)|/))`", row):
            found = next((folder / name for folder in reversed(folders) if (folder / name).exists()), None)
            assert found is not None, f"{name} is not there: {row}"
            folders += [*(each for each in reversed(found.parents) if ROOT in each.parents), found]
