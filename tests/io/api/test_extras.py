"""Without the packages of an extra: what needs them says which extra has them, and nothing else fails."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

BLOCK = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
EACH_NAME = """
for package in {packages}:
    module = importlib.import_module(package)
    for name in module.__all__:
        try:
            getattr(module, name)
        except ImportError as error:
            print(name, error)
"""
USES = """
from unified import RoleGroup, WeightsReceiver, shared_empty
from unified.checkpoint import CheckpointManager
manager = CheckpointManager(sys.argv[1])
assert manager.save_bytes(b"bytes", step=1)
manager.wait()
assert manager.load_bytes(1) == b"bytes"
for use in (
    lambda: manager.save({"a": 1}, step=2),
    lambda: manager.load_state(1),
    lambda: manager.load_state_into({}, 1),
    lambda: WeightsReceiver(),
    lambda: RoleGroup.sync_weights(None, {}),
    lambda: shared_empty((1,)),
):
    try:
        use()
    except Exception as error:
        print(error)
manager.close()
"""
SIMULATE = """
from unified.cli.main import main
sys.stderr = sys.stdout
assert main(["simulate"]) == 2
"""
PACKAGES = [
    *("unified", "unified.api.builder", "unified.api.runtime", "unified.job", "unified.checkpoint", "unified.storage"),
    *("unified.data", "unified.api.runtime.worker", "unified.api.runtime.queue", "unified.api.runtime.rpc_helper"),
    "unified.compat.dtruntime",
]
TORCH = "needs torch, which is not installed: pip install 'unified-runtime[torch]'."


def run(script: str, absent: set[str], *arguments: str) -> list[str]:
    code = BLOCK.format(absent=absent) + script
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_public_names_that_need_torch_say_so() -> None:
    told = run(EACH_NAME.format(packages=PACKAGES), {"torch", "numpy"})
    assert {line.split()[0] for line in told} == {
        *("DataLoaderIter", "Dataset", "RayDataLoaderIter", "patch_dataloader_ray", "ShardSource", "ShardedDataset")
    }
    assert not [line for line in told if not line.endswith(TORCH)]


@pytest.mark.parametrize(
    "absent",
    [
        {"pyarrow", "botocore", "boto3", "backports", "xxhash"},
        *(pytest.param({name}, marks=pytest.mark.slow) for name in ("pyarrow", "botocore", "backports", "xxhash")),
    ],
)
def test_no_public_name_needs_another_extra(absent: set[str]) -> None:
    assert run(EACH_NAME.format(packages=PACKAGES), absent) == []


def test_uses_that_need_torch_say_so(tmp_path: Path) -> None:
    told = run(USES, {"torch", "numpy"}, str(tmp_path))
    assert told[:5] == [
        f"{name} {TORCH}"
        for name in (
            *("CheckpointManager.save()", "CheckpointManager.load_state()", "CheckpointManager.load_state_into()"),
            *("WeightsReceiver", "RoleGroup.sync_weights()"),
        )
    ]
    assert "pip install 'unified-runtime[torch]'" in told[5]


def test_a_simulation_says_which_extra_it_needs() -> None:
    (told,) = run(SIMULATE, {"unified_simulator"})
    advice = "pip install 'unified-runtime[simulator]'"
    assert told == f"unified simulate needs unified_simulator, which is not installed: {advice}."
