"""Documents that run: Python blocks compile, those marked `run` are executed, links lead somewhere."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.launch import run as launch
from unified.protocol import envelope, framing
from unified.queue import journal
from unified_master import store

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "agent").glob("*.md"),
        *(ROOT / "gateway").glob("*.md"),
        *(ROOT / "master").glob("*.md"),
        *(ROOT / "tests").rglob("*.md"),
    ]
)
FENCE = re.compile(r"^```(?P<language>\w*)(?P<note>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ANCHOR = re.compile(r"\]\((?P<page>[^)#\s:]*)#(?P<anchor>[^)]+)\)")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


class Snippet(NamedTuple):
    where: str
    code: str
    is_run: bool


def snippet_of(page: Path, block: re.Match[str]) -> Snippet:
    line = block.string.count("\n", 0, block.start()) + 1
    return Snippet(f"{page.relative_to(ROOT)}:{line}", block["code"], "run" in block["note"].split())


BLOCKS = [(page, block) for page in PAGES for block in FENCE.finditer(page.read_text())]
SNIPPETS = [snippet_of(page, block) for page, block in BLOCKS if block["language"] == "python"]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.where)
def test_python_block_compiles(snippet: Snippet) -> None:
    assert ast.parse(snippet.code, snippet.where).body


@pytest.mark.processes
@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if s.is_run], ids=lambda snippet: snippet.where)
def test_python_block_marked_run_does_run(snippet: Snippet, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(snippet.code)
    code = "import snippet"  # not as __main__: what submits a job is behind that guard, and runs in tests/cluster
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{snippet.where}\n{done.stderr}"


def test_some_blocks_are_run() -> None:
    assert any(snippet.is_run for snippet in SNIPPETS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_to_files(page: Path) -> None:
    targets = [link["target"] for link in LINK.finditer(FENCE.sub("", page.read_text()))]
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Git hosts make them."""
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text) for text in HEADING.findall(FENCE.sub("", page.read_text()))]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_headings(page: Path) -> None:
    links = [
        (page.parent / link["page"] if link["page"] else page, link["anchor"])
        for link in ANCHOR.finditer(FENCE.sub("", page.read_text()))
    ]
    assert not [(target.name, anchor) for target, anchor in links if anchor not in anchors(target)]


def test_readme_says_what_it_is_before_the_first_command() -> None:
    first, _, _ = (ROOT / "README.md").read_text().partition("```")
    numbers = re.findall(r"^- \*\*.*?\(`make bench-\w+`\)", first, re.MULTILINE | re.DOTALL)
    assert len(numbers) == 3, "three numbers, each with the command that reproduces it"
    pages = ["docs/from-torchrun.md", "docs/from-ray.md", "benchmarks/README.md", "#what-was-not-run"]
    assert [page for page in pages if f"]({page})" not in first] == []


def test_readme_s_numbers_are_those_of_the_tables() -> None:
    first, _, _ = (ROOT / "README.md").read_text().partition("```")
    lines = (ROOT / "benchmarks/README.md").read_text().splitlines()
    for beginning, figures in {
        "| command to all_reduce | unified, running cluster |": ["0.27"],
        "| command to all_reduce | torchrun |": ["3.84"],
        "| command to all_reduce | unified, cluster of its own |": ["2.31"],
        "| one rank of 4 |": ["0.16", "0.34", "8.14"],
        "| sync call, median, µs |": ["44", "834"],
    }.items():
        (row,) = (line for line in lines if line.startswith(beginning))
        measured = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", row.removeprefix(beginning))]
        for figure in figures:
            digits = len(figure.partition(".")[2])
            assert float(figure) in [round(each, digits) for each in measured], f"{figure} is not in: {row}"
            assert re.search(rf"(?<![\d.]){re.escape(figure)} (s|µs)", first), f"README does not say {figure}"


def test_launch_benchmark_fills_a_table_that_is_there() -> None:
    assert launch.README.read_text().count(launch.MARK) == 1


def test_page_of_versions_has_the_numbers_of_the_code() -> None:
    rows = (ROOT / "docs/versions.md").read_text()
    for what, version in [
        ("control messages", framing.PROTOCOL_VERSION),
        ("bus messages", envelope.BUS_VERSION),
        ("the master's file", store.SCHEMA_VERSION),
        ("the journal", journal.SCHEMA_VERSION),
    ]:
        assert re.search(rf"^\| {what}[^|]*\| {version} \|", rows, re.MULTILINE), f"{what} is of version {version}"
    assert f"version {metadata.version('unified-runtime')}" in rows


def test_no_page_says_that_a_save_keeps_training() -> None:
    found = [page.name for page in PAGES if re.search(r"keeps? training for", page.read_text())]
    assert not found, "a save stops training for so long"


@pytest.mark.processes
def test_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
