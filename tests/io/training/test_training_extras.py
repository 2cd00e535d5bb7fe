"""A framework whose packages are not installed: the base says which extra brings them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import sys
sys.modules[sys.argv.pop(1)] = None  # as if it were not installed
from unified.training import main
sys.exit(main())
"""


@pytest.mark.parametrize(("framework", "module"), [("hf", "transformers"), ("hf", "accelerate"), ("nemo", "lightning")])
def test_a_missing_package_is_named_with_its_extra(framework: str, module: str, tmp_path: Path) -> None:
    if module == "transformers":
        pytest.importorskip("accelerate", reason="else that one is missed first")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    options = {
        "framework": framework,
        "run-id": "run",
        "checkpoint-base-uri": str(tmp_path / "runs"),
        "dataset-uri": str(rows),
        "model-id": "config:{}",
    }
    argv = [text for name, value in options.items() for text in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *argv], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (
        2,
        f"unified-train: framework {framework} needs {module}, which is not installed: "
        f"pip install 'unified-runtime[{framework}]'.",
    )
