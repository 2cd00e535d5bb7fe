"""Documents that run: Python blocks compile, those marked `run` are executed, links lead somewhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

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
        *(ROOT / "master").glob("*.md"),
        *(ROOT / "tests").rglob("*.md"),
    ]
)
FENCE = re.compile(r"^```(?P<language>\w*)(?P<note>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
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


def test_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
