"""The lowest versions that pyproject.toml allows do what the suite wants of them, beside those that `make` installs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGS = [
    *(f"tests/unit/job/test_{part}.py" for part in ("config", "workloads", "to_spec", "payload")),
    *("tests/unit/api/builder/test_builder.py", "tests/unit/compat/test_document_blocks.py"),
    *("tests/unit/compat/test_names.py", "tests/unit/worker/test_context.py"),
    "tests/io/checkpoint/test_checkpoint_run_layout.py",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("requirement", ["omegaconf==2.3.0", "omegaconf==2.4.0"])
def test_suite_with_another_version(requirement: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    done = subprocess.run(
        [*pip, "--target", str(tmp_path / "site"), requirement], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"{requirement} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    name, _, version = requirement.partition("==")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    used = subprocess.run(
        [sys.executable, "-c", f"from importlib.metadata import version; print(version({name!r}))"],
        capture_output=True, text=True, env=env, check=True,
    )  # fmt: skip
    assert used.stdout.strip() == version
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CONFIGS],
        capture_output=True, text=True, cwd=ROOT, env=env, check=False,
    )  # fmt: skip
    assert suite.returncode == 0, suite.stdout
