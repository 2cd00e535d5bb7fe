"""Upstream's import paths: what they lead to, and what they leave alone."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator

import pytest

from unified import compat
from unified.compat.finder import AliasFinder
from unified.compat.names import ALIASES
from unified.errors import OptionError

UPSTREAM = "dlrover.python.unified"


@pytest.fixture
def aliases() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("aliases")
@pytest.mark.parametrize("alias", ALIASES)
def test_each_alias_is_the_module_that_it_stands_for(alias: str) -> None:
    module = importlib.import_module(alias)
    assert module is importlib.import_module(ALIASES[alias])
    assert module.__name__ == ALIASES[alias], "the real module keeps its name"
    assert module.__spec__ is not None
    assert module.__spec__.name == ALIASES[alias], "and its spec"


@pytest.mark.usefixtures("aliases")
@pytest.mark.parametrize(
    "path", ["builder", "builder.rl", "runtime", "runtime.worker", "runtime.queue", "runtime.rpc_helper"]
)
def test_modules_below_the_api_have_both_names(path: str) -> None:
    assert importlib.import_module(f"{UPSTREAM}.api.{path}") is importlib.import_module(f"unified.api.{path}")


@pytest.mark.usefixtures("aliases")
def test_names_that_are_imported_are_ours() -> None:
    from dlrover.python.unified.api.builder import DLJobBuilder  # type: ignore[import-not-found]
    from dlrover.python.unified.api.builder.base import DLJob  # type: ignore[import-not-found]
    from dlrover.python.unified.api.runtime import current_worker, rpc  # type: ignore[import-not-found]
    from dlrover.python.unified.api.runtime.ray_dataloader_iter import patch_dataloader_ray  # type: ignore[import-not-found]
    from dlrover.python.unified.api.runtime.rpc_helper import RPC_REGISTRY  # type: ignore[import-not-found]
    from dlrover.python.unified.common.config import JobConfig  # type: ignore[import-not-found]
    from dlrover.python.unified.common.enums import DLType  # type: ignore[import-not-found]
    from dlrover.python.unified.common.workload_desc import ResourceDesc  # type: ignore[import-not-found]

    import unified
    import unified.job
    from unified.bus.calls.registry import RPC_REGISTRY as OURS

    assert (DLJobBuilder, DLJob) == (unified.DLJobBuilder, unified.DLJob)
    found = (current_worker, rpc, patch_dataloader_ray)
    assert found == (unified.current_worker, unified.rpc, unified.patch_dataloader_ray)
    assert RPC_REGISTRY is OURS, "what is exported under one name is found under the other"
    assert (JobConfig, DLType, ResourceDesc) == (unified.job.JobConfig, unified.job.DLType, unified.job.ResourceDesc)


@pytest.mark.usefixtures("aliases")
@pytest.mark.parametrize("name", ["DatasetRegistry", "TrainingOrchestrator", "CheckpointManager"])
def test_names_of_dtruntime_are_those_of_our_packages(name: str) -> None:
    home = "unified.checkpoint" if name == "CheckpointManager" else "unified.data"
    assert getattr(importlib.import_module("dtruntime"), name) is getattr(importlib.import_module(home), name)


@pytest.mark.usefixtures("aliases")
def test_dtruntime_loads_nothing_until_a_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("unified.data", "unified.checkpoint"))]:
        monkeypatch.delitem(sys.modules, name)
    dtruntime = importlib.import_module("dtruntime")
    assert not {"unified.data", "unified.checkpoint"} & set(sys.modules)
    assert {"DatasetRegistry", "CheckpointManager", "TrainingOrchestrator"} <= set(dir(dtruntime))
    with pytest.raises(AttributeError, match="Did you mean 'DatasetRegistry'"):
        dtruntime.DatasetRegistri  # noqa: B018  # the look-up is the test


@pytest.mark.usefixtures("aliases")
@pytest.mark.parametrize(
    "name",
    ["dlrover.nothing", f"{UPSTREAM}.common.nothing", f"{UPSTREAM}.api.nothing", f"{UPSTREAM}.api.builder.rl.deeper"],
)
def test_modules_that_unified_has_not_are_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)


@pytest.mark.usefixtures("aliases")
def test_other_imports_pass_by() -> None:
    finder = next(finder for finder in sys.meta_path if isinstance(finder, AliasFinder))
    assert finder.find_spec("json", None) is None
    assert finder.find_spec("dlrover_tools", None) is None
    assert importlib.util.find_spec("dlrover_tools") is None


def test_without_the_aliases_there_is_no_such_module_again() -> None:
    compat.install()
    importlib.import_module(f"{UPSTREAM}.api.builder")
    importlib.import_module("dtruntime")
    compat.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] in ("dlrover", "dtruntime")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dlrover")
    assert importlib.import_module("unified.api.builder")


def test_installing_twice_is_installing_once() -> None:
    compat.install()
    compat.install()
    assert sum(isinstance(finder, AliasFinder) for finder in sys.meta_path) == 1
    compat.uninstall()
    assert not compat.is_installed()
    compat.uninstall()


@pytest.mark.parametrize(
    ("word", "meant"),
    [("", "off"), ("0", "off"), ("off", "off"), ("1", "on"), ("True", "on"), ("force", "force"), ("FORCE", "force")],
)
def test_words_of_the_variable(word: str, meant: str) -> None:
    assert compat.mode({"UNIFIED_COMPAT": word}) == meant


def test_the_variable_says_whether_there_are_aliases() -> None:
    compat.apply({"UNIFIED_COMPAT": "1"})
    assert compat.is_installed()
    compat.apply({})
    assert not compat.is_installed()
    with pytest.raises(OptionError, match="UNIFIED_COMPAT='maybe' is none of 1, 0 and force"):
        compat.apply({"UNIFIED_COMPAT": "maybe"})


# A module that is there already, as a real one is once it was imported. Real files: test_compat_files.py.


@pytest.mark.usefixtures("aliases")
def test_a_package_that_somebody_made_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("dlrover")
    real.__path__ = []
    monkeypatch.setitem(sys.modules, "dlrover", real)
    assert compat.found_installed() == {"dlrover": "this process"}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{UPSTREAM}.api.builder")
    compat.install(force=True)
    assert importlib.import_module(f"{UPSTREAM}.api.builder") is importlib.import_module("unified.api.builder")
