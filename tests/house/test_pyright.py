"""The types of calls as pyright sees them, the checker of many editors: `make types` asks mypy alone."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "1.1.407"
CALLS = ROOT / "tests/unit/api/runtime/test_call_types.py"

pytestmark = pytest.mark.slow


def checked(file: Path) -> "subprocess.CompletedProcess[str]":
    """Run pyright over a file; npm installs it into `out`."""
    if shutil.which("npm") is None:
        pytest.skip("pyright is installed by npm, which is not here")
    folder = ROOT / "out/pyright"
    subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), f"pyright@{VERSION}"], check=True)
    command = ["node", str(folder / "node_modules/pyright/index.js"), "--pythonpath", sys.executable, str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_pyright_sees_what_a_call_gives(tmp_path: Path) -> None:
    found = checked(CALLS)
    assert found.returncode == 0, found.stdout
    wrong = tmp_path / "wrong.py"
    text = CALLS.read_text()
    right = "assert_type(actor.call(add, 1, y=2), RpcFuture[int])"
    assert right in text
    wrong.write_text(text.replace(right, right.replace("int", "bytes")))
    assert checked(wrong).returncode == 1, "what is wrong is found"
