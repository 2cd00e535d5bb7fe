"""A rank's environment and torch's settings beside those of a fresh process, a relative PYTHONPATH, and tracebacks."""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.testing import LocalCluster

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PROBE = """
import json, logging, os, subprocess, sys

child = subprocess.run(["env", "-0"], capture_output=True, text=True).stdout.split("\\0")
found = {"environ": dict(os.environ), "of a child": dict(line.split("=", 1) for line in child if line)}
if "torch" in sys.argv:
    import torch
    import torch._dynamo.config, torch._functorch.config, torch._inductor.config, torch.fx.experimental._config
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel  # for the guess of what the zygote imports

    def plain(value):
        if isinstance(value, (set, frozenset)):
            return sorted(map(str, value))
        return value if isinstance(value, (bool, int, float, str, list, tuple, dict, type(None))) else str(type(value))

    settings = {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "matmul": torch.get_float32_matmul_precision(),
        "interop": torch.get_num_interop_threads(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "debug": str(torch.distributed.get_debug_level()),
        "print": vars(torch._tensor_str.PRINT_OPTS),
        "loggers": {name: logging.getLogger(name).level for name in ("torch", "torch._dynamo", "torch.distributed")},
        "root": [logging.root.level, len(logging.root.handlers)],
        "streams": [sys.stdout.mode, sys.stderr.mode],
    }
    for config in (
        torch._dynamo.config, torch._functorch.config, torch._inductor.config, torch.fx.experimental._config
    ):
        settings[config.__name__] = {name: plain(value) for name, value in config.get_config_copy().items()}
    for name, module in vars(torch.backends).items():
        values = {key: getattr(module, key, None) for key in dir(module) if not key.startswith("__")}
        settings[f"backends.{name}"] = {
            key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))
        }
    found["settings"] = settings
with open(f"{sys.argv[1]}-{os.environ.get('RANK', 'fresh')}.json", "w") as file:
    json.dump(found, file, default=str)
"""


def documented() -> list[str]:
    """Patterns of the variables that a rank has, or has with other values than a fresh process, by the documents."""
    text = (ROOT / "docs/from-torchrun.md").read_text()
    section = text.split("\n## Environment variables\n")[1].split("\n## ")[0]
    return re.findall(r"`([A-Z][A-Z0-9_]*\*?)`", section)


def differences(fresh: dict[str, Any], rank: dict[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name in {*fresh, *rank}:
        one, other = fresh.get(name, "not there"), rank.get(name, "not there")
        if isinstance(one, dict) and isinstance(other, dict):
            found.update(differences(one, other, f"{path}{name}/"))
        elif one != other:
            found[f"{path}{name}"] = (one, other)
    return found


@pytest.mark.parametrize(
    ("words", "argument", "ranks"),
    [(["--nproc-per-node=2"], "torch", 2), (["--no-python", "--nproc-per-node=1", sys.executable], "plain", 1)],
    ids=["a-training-script", "any-program"],
)
def test_a_rank_has_the_environment_and_the_settings_of_a_fresh_process_but_for_what_the_documents_name(
    tmp_path: Path, words: list[str], argument: str, ranks: int
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("UNIFIED_", "TORCH"))}
    outer["UNIFIED_MASTER"] = ""  # not the cluster that a tester has up
    for command in ([sys.executable], [sys.executable, "-m", "unified", "run", *words]):
        given = [*command, "probe.py", "probe", argument]
        ran = subprocess.run(given, cwd=tmp_path, env=outer, capture_output=True, text=True, timeout=100, check=False)
        assert ran.returncode == 0, ran.stderr
    fresh, *found = (json.loads((tmp_path / f"probe-{name}.json").read_text()) for name in ("fresh", *range(ranks)))
    assert argument == "plain" or len(fresh["settings"]) > 20
    for rank in found:
        different = differences(fresh, rank)
        unknown = {
            name: values
            for name, values in different.items()
            if name.startswith("settings/")
            or not any(fnmatch(name.partition("/")[2], pattern) for pattern in documented())
        }
        assert not unknown
        assert {"environ/RANK", "of a child/RANK"} <= different.keys(), "the comparison sees what differs"
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in rank["environ"]


LOOKS = """
import os, subprocess, sys
print("variable", os.environ["PYTHONPATH"], flush=True)
os.chdir("/")
import mine
print("imported", mine.__file__, flush=True)
child = [sys.executable, "-c", "import mine; print('child', mine.__file__, flush=True)"]
sys.stdout.flush()
subprocess.run(child, check=True)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as READMEs have it, from which ``PYTHONPATH=src`` is meant."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src/mine.py").touch()
    (folder / "looks.py").write_text(LOOKS)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/no/such")
    return folder


def seen(out: str) -> dict[str, str]:
    lines = [line.split() for line in out.splitlines()]
    return {words[-2]: words[-1] for words in lines if len(words) > 1}


def expected(source: Path) -> dict[str, str]:
    file = str(source / "mine.py")
    return {"variable": f"{source}{os.pathsep}/no/such", "imported": file, "child": file}


def cluster_elsewhere(local_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    """A cluster that was started in another folder, with a relative PYTHONPATH of its own."""
    with monkeypatch.context() as there:
        (tmp_path / "elsewhere").mkdir()
        there.chdir(tmp_path / "elsewhere")
        there.setenv("PYTHONPATH", "lib")
        return local_cluster(nodes=1, devices=1)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("where", ["own", "running", "shipped"])
def test_a_relative_pythonpath_is_the_submitter_s(
    project: Path, tmp_path: Path, local_cluster: Cluster, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], where: str,
) -> None:  # fmt: skip
    words = ["--master", "local"]
    if where != "own":
        cluster = cluster_elsewhere(local_cluster, tmp_path, monkeypatch)
        words = ["--master", cluster.address, *(["--ship"] if where == "shipped" else [])]
    assert main(["run", *words, "--prefix", "never", "looks.py"]) == 0
    found = seen(capfd.readouterr().out)
    source = project / "src"
    if where == "shipped":
        source = Path(found["imported"]).parent
        assert source.is_relative_to(cluster.home / "code")
    if where == "own":  # the agent of `without_torch` puts an entry of its own in front
        found["variable"] = found["variable"].partition(os.pathsep)[2]
    assert found == expected(source)


@pytest.mark.usefixtures("without_torch")
def test_a_relative_pythonpath_of_a_role_is_the_submitter_s(
    project: Path, tmp_path: Path, local_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_elsewhere(local_cluster, tmp_path, monkeypatch)
    monkeypatch.delenv("PYTHONPATH")
    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    role = builder.workload("role", str(project / "looks.py")).resource(cpu=0.1)
    role.env({"PYTHONPATH": f"src{os.pathsep}/no/such"})
    handle = cluster.submit(builder.build(), "paths", working_dir=str(tmp_path))
    assert handle.wait(100) == 0
    assert seen("\n".join(handle.logs())) == expected(project / "src")


def test_a_driver_that_has_changed_its_folder_passes_on_the_path_that_it_has_itself(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    code = "import os; from unified.config.settings import python_path as p; os.chdir('/'); print(p(os.environ))"
    env = {**os.environ, "PYTHONPATH": f"src{os.pathsep}{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=True
    )
    assert ran.stdout.strip() == str({"PYTHONPATH": f"{tmp_path}/src{os.pathsep}{ROOT}"})
