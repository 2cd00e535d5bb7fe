"""The page's files: small, safe, as they were vendored, and in the wheel; their pure parts pass tests of their own."""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "gateway/unified_gateway/static"
SCRIPTS = ROOT / "tests/browser/scripts"
MAX_LINES, MAX_ALL_LINES = 300, 3000
WRITES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySetInnerHTML|DOMParser|createContextualFragment"
    r"|\beval\(|new Function|srcdoc|javascript:"
)
ELSEWHERE = re.compile(r"https?://(?!www\.w3\.org/)|['\"(]//")
RUN_TESTS_WITHIN_S = 100.0


def own_files() -> list[Path]:
    return [path for path in sorted(STATIC.rglob("*")) if path.is_file() and "vendor" not in path.parts]


def test_no_file_is_longer_than_one_sitting() -> None:
    lines = {path.relative_to(STATIC).as_posix(): path.read_text().splitlines() for path in own_files()}
    assert {name: len(found) for name, found in lines.items() if len(found) > MAX_LINES} == {}
    assert sum(map(len, lines.values())) <= MAX_ALL_LINES


def test_nothing_writes_markup_or_asks_elsewhere() -> None:
    """The browser refuses both, too: by trusted types, and by the content security policy."""
    found = [
        f"{path.relative_to(STATIC)}:{number}: {line.strip()[:80]}"
        for path in own_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if WRITES_MARKUP.search(line) or ELSEWHERE.search(line)
    ]
    assert not found, found
    index = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", index)


def test_vendored_files_are_those_that_were_made() -> None:
    vendor = STATIC / "vendor"
    told = json.loads((vendor / "vendor.json").read_text())
    made = {name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for name in told["sha256"]}
    assert made == told["sha256"], "run `make vendor`"
    assert {path.name for path in vendor.iterdir()} == {*told["sha256"], "vendor.json"}
    lock = json.loads((ROOT / "scripts/vendor/package-lock.json").read_text())["packages"]
    shipped = {path.removeprefix("node_modules/"): each for path, each in lock.items() if path and not each.get("dev")}
    assert {name: (each["version"], each["integrity"]) for name, each in shipped.items()} == {
        name: (each["version"], each["integrity"]) for name, each in told["packages"].items()
    }
    licences = (vendor / "LICENSES.txt").read_text()
    for name, each in told["packages"].items():
        assert f"{name} {each['version']} ({each['licence']})" in licences


def test_scripts_that_know_no_browser_pass_their_own_tests(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the page's scripts are tested where there is one")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < 20:
        pytest.skip(f"node {version.strip()} is older than 20")
    shutil.copytree(STATIC, tmp_path / "static")
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "package.json").write_text('{"type": "module"}')  # as a browser takes them
    tests = sorted(map(str, (tmp_path / "scripts").glob("*.test.js")))
    done = subprocess.run(
        [node, "--test", *tests], cwd=tmp_path, capture_output=True, text=True, timeout=RUN_TESTS_WITHIN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE) or re.search(r"pass [1-9]", done.stdout)
