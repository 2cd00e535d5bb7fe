"""Processes that a script under `unified.compat` starts, which import upstream's names before anything of `unified`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = "unified/compat/stand_in"
PRINT = "import dtruntime; from dlrover.python.unified.api.builder import DLJobBuilder as B; print(dtruntime, B)"
PRINTED = "<module 'unified.compat.dtruntime' "


def run(script: str, folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A script of this text, under the command; without what this process's environment says."""
    (folder / "train.py").write_text(script)
    inherited = {name: value for name, value in os.environ.items() if name not in ("UNIFIED_COMPAT", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-m", "unified.compat", *flags, folder / "train.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**inherited, **env},
        check=False,
        timeout=100,
    )


SPAWN = """
import multiprocessing
from dlrover.python.unified.api.builder import DLJobBuilder
import dtruntime

class Sample(dtruntime.DatasetRegistry):
    pass

def work(kind, told):
    told.put((__name__, kind.__mro__[1].__module__, DLJobBuilder.__module__))

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        told = context.SimpleQueue()
        process = context.Process(target=work, args=(Sample, told))
        process.start()
        process.join()
        print(process.exitcode, *told.get())
"""


def test_processes_of_multiprocessing(tmp_path: Path) -> None:
    """They import the script again by its path; classes that it makes of ours can be sent to them."""
    done = run(SPAWN, tmp_path)
    assert done.stdout == "0 __mp_main__ unified.data.registry unified.api.builder.builder\n" * 2, done.stderr


def test_processes_of_this_interpreter_and_their_own(tmp_path: Path) -> None:
    child = f"import subprocess, sys; {PRINT}; subprocess.run([sys.executable, '-c', {PRINT!r}], check=True)"
    done = run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)", tmp_path)
    assert done.stdout.count(PRINTED) == 2, done.stderr


def test_children_that_are_told_not_to_have_no_aliases(tmp_path: Path) -> None:
    start = "import os, subprocess, sys; os.environ['UNIFIED_COMPAT'] = '0'; "
    done = run(f"{start}sys.exit(subprocess.run([sys.executable, '-c', {PRINT!r}]).returncode)", tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'dtruntime'" in done.stderr


def test_path_of_the_user_stays(tmp_path: Path) -> None:
    child = "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:])"
    done = run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, 'x'])", tmp_path)
    assert done.stdout.endswith(f"/{FOLDER} ['x']\n")
    done = run(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", tmp_path, PYTHONPATH="/a:/b"
    )
    assert done.stdout.startswith("/a:/b:/")


def test_interpreter_without_unified_is_not_disturbed(tmp_path: Path) -> None:
    """One that finds no packages but those of the user: their real package is theirs."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/dtruntime.py").write_text("DatasetRegistry = 'the real one'")
    child = "import dtruntime; print(dtruntime.DatasetRegistry)"
    start = f"import os, subprocess, sys; os.environ['PYTHONPATH'] += ':{tmp_path}/theirs'; "
    # -S: without site-packages, and so without `unified`, unless that is beside the script.
    done = run(f"{start}subprocess.run([sys.executable, '-S', '-c', {child!r}], check=True)", tmp_path)
    assert done.stdout == "the real one\n", done.stderr


LOADER = """
import torch
from dtruntime import CheckpointManager

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index if CheckpointManager.__module__.startswith("unified.") else -1

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    print([int(each) for each in loader])
"""


@pytest.mark.slow
def test_workers_of_torchs_data_loader(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(LOADER, tmp_path)
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr
