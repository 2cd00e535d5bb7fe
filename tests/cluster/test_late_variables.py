"""Variables that a script sets before its first `import torch`."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys, traceback
try:
    import no_such_module
except ImportError:
    traceback.print_exc(file=sys.stdout)
os.environ["OMP_NUM_THREADS"] = "3"
os.environ["TORCH_LOGS"] = "+dynamo"
os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
os.environ["PYTORCH_JIT"] = "0"
os.environ["PYTHONHASHSEED"] = "7"
os.environ["MINE"] = "1"
import torch
import logging
level = logging.getLogger("torch._dynamo").level
print("seen", torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, level, flush=True)
import torch.nn
"""


def test_what_can_be_applied_is_and_the_rest_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "unified", "run", "sets.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "seen 3 True 10" in ran.stdout
    shown = ran.stdout.partition("Traceback")[2].partition("ModuleNotFoundError")[0]
    assert shown.count("File ") == 1, "no frame of ours"
    assert 'sets.py", line 4' in shown
    lines = [line for line in ran.stderr.splitlines() if "has no effect" in line]
    assert len(lines) == 1
    assert "PYTORCH_JIT changed after torch was imported" in lines[0]
    assert "--env PYTORCH_JIT=0, or env()" in lines[0]
    assert not any(name in lines[0] for name in ("TORCH_LOGS", "TF32", "PYTHONHASHSEED", "MINE", "OMP"))
