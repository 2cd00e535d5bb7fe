"""Modules that a job names: a real zygote imports them before it forks, and its children say what went wrong."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.io.worker.test_zygote import DEADLINE_S, ZygoteProcess
from unified.protocol.agent_zygote import ZygoteUp
from unified.testing import eventually

pytestmark = pytest.mark.processes

Preload = Callable[..., ZygoteProcess]
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
SO = "So workers start as new interpreters and import everything again: take it out of the preload."


@pytest.fixture
def preload(tmp_path: Path) -> Iterator[Preload]:
    started: list[ZygoteProcess] = []

    def run(names: str, **modules: str) -> ZygoteProcess:
        for module, text in modules.items():
            (tmp_path / f"{module}.py").write_text(text)
        started.append(ZygoteProcess(tmp_path, "--preload", names))
        assert isinstance(started[0].next(), ZygoteUp)
        return started[0]

    yield run
    for one in started:
        one.close()


def told(zygote: ZygoteProcess, expression: str) -> tuple[str, list[str]]:
    """What a child finds an expression to be, and the lines of its stderr."""
    child = zygote.fork(f"tell {expression}")
    found = child.read(child.out).strip(), child.read(child.err).splitlines()
    assert zygote.exited(child) == 0
    return found


def test_a_child_has_the_modules_that_its_zygote_imported(preload: Preload) -> None:
    zygote = preload("mine,json.tool", mine="import os\npid = os.getpid()\n")
    assert told(zygote, "sys.modules['mine'].pid, 'json.tool' in sys.modules") == (f"({zygote.process.pid}, True)", [])


def test_the_name_of_a_part_has_a_lazy_package_import_it(preload: Preload) -> None:
    lazy = "def __getattr__(name):\n    import heavy\n    return getattr(heavy, name)\n"
    zygote = preload("lazy.Trainer", lazy=lazy, heavy="class Trainer: pass\n")
    assert told(zygote, "'heavy' in sys.modules") == ("True", [])


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("trll", None, "ModuleNotFoundError: No module named 'trll'"),
        ("mine.trainer", "", "AttributeError: module 'mine' has no attribute 'trainer'"),
        ("mine", "import no_such\n", "ModuleNotFoundError: No module named 'no_such'"),
        ("mine", "raise ValueError('two\\nlines')\n", "ValueError: two lines"),
        ("mine", "raise SystemExit(3)\n", "SystemExit: 3"),
        ("mine", "def\n", "SyntaxError: "),
    ],
)
def test_a_failed_import_is_a_line_of_each_child(preload: Preload, name: str, text: str | None, reason: str) -> None:
    zygote = preload(f"{name},json.tool", **({} if text is None else {"mine": text}))
    for _ in range(2):
        found, said = told(zygote, "'json.tool' in sys.modules")
        assert found == "True"
        assert len(said) == 1
        assert said[0].startswith(f"unified: preload of {name!r} failed: {reason}")


def test_an_import_that_left_a_file_open_is_named_and_its_children_are_new_interpreters(
    preload: Preload, tmp_path: Path
) -> None:
    log = tmp_path / "import.log"
    zygote = preload("json.tool,mine", mine=f"log = open({str(log)!r}, 'w')\n")
    child = zygote.fork("exit 5")
    assert child.read(child.out) == "fresh\n"
    assert child.read(child.err) == f"unified: preload of 'mine' left {log} open, which a fork lacks. {SO}\n"


def test_an_import_that_started_threads_is_named_and_its_children_are_new_interpreters(preload: Preload) -> None:
    zygote = preload("json.tool,mine", mine=THREAD)
    child = zygote.fork("exit 5")
    assert child.read(child.out) == "fresh\n"
    assert child.read(child.err) == f"unified: preload of 'mine' started 1 thread(s), which a fork lacks. {SO}\n"
    assert zygote.exited(child) == 5


def test_threads_that_have_ended_prevent_no_fork(preload: Preload, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    zygote = preload("mine", mine=f"import threading\nthreading.Thread(target=open, args=[{str(go)!r}]).start()\n")
    go.write_bytes(b"")
    assert eventually(lambda: len(os.listdir(f"/proc/{zygote.process.pid}/task")) == 1, DEADLINE_S)
    assert told(zygote, "'mine' in sys.modules") == ("True", [])


SEEN = "import os\nseen = [os.environ.get(n) for n in ('OMP_NUM_THREADS', 'PYTORCH_NVML_BASED_CUDA_CHECK')]\n"


@pytest.mark.parametrize("given", [None, "0"])
def test_imports_initialise_no_cuda_and_leave_only_their_own_variables(
    preload: Preload, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    if given:
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", given)
    zygote = preload("mine", mine=f"{SEEN}os.environ['MINE'] = 'set'\n")
    assert told(zygote, "sys.modules['mine'].seen") == (str(["1", given or "1"]), [])
    names = "('OMP_NUM_THREADS', 'PYTORCH_NVML_BASED_CUDA_CHECK', 'MINE')"
    assert told(zygote, f"[os.environ.get(name) for name in {names}]") == (str(["3", given, "set"]), [])


NVML = (
    "int users; int nvmlInit_v2(void) { users++; return 0; } int nvmlShutdown(void) { return users ? users--, 0 : 1; }"
)
LOOK = "import ctypes\nnvml = ctypes.CDLL('libnvidia-ml.so.1')\nnvml.nvmlInit_v2(), nvml.nvmlInit_v2()\n"


def test_an_import_that_looked_for_gpus_leaves_nvml_shut_down(
    preload: Preload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child has none of its zygote's descriptors, and NVML would use them."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "nvml.c").write_text(NVML)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "nvml.c")], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    zygote = preload("mine", mine=LOOK)
    users = "__import__('ctypes').c_int.in_dll(sys.modules['mine'].nvml, 'users').value"
    assert told(zygote, users) == ("0", [])


def test_children_share_no_random_numbers_and_no_secret_of_a_preloaded_library(
    preload: Preload, tmp_path: Path
) -> None:
    """`transformers.Trainer` imports `datasets`, which draws the names of its cache files, and `multiprocess`."""
    for package, module, text in (
        ("datasets", "fingerprint", "import random\nfingerprint_rng = random.Random()\n"),
        (
            "multiprocess",
            "process",
            "import types\nmain = types.SimpleNamespace(authkey=b'')\ncurrent_process = lambda: main\n",
        ),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / f"{module}.py").write_text(text)
    zygote = preload("datasets.fingerprint,multiprocess.process,unified.worker.fork_setup")
    renewed = "(sys.modules['unified.worker.fork_setup'].renew_randomness(), sys.modules)[1]"
    drawn = [told(zygote, f"{renewed}['datasets.fingerprint'].fingerprint_rng.random()") for _ in range(2)]
    keys = [told(zygote, f"{renewed}['multiprocess.process'].main.authkey") for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert keys[0] != keys[1]
