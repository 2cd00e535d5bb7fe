"""Code for workers, written by a test, clusters that do without torch, a control group, and a bucket."""

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.fake_nvml import fake_nvml  # noqa: F401 - a fixture
from tests.support.full_disk import small_disk  # noqa: F401 - a fixture
from tests.support.s3 import s3_environment, s3_server  # noqa: F401 - fixtures, one server for the whole session
from tests.support.training_api import service  # noqa: F401 - a fixture
from unified.client.daemons import Daemon
from unified.config import cgroups
from unified.testing import LocalCluster, eventually

Cluster = Callable[..., LocalCluster]
PROGRAMS = Path(__file__).parents[1] / "support/programs"


class Project(Protocol):
    def __call__(self, **modules: str) -> None: ...


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A folder that this process and its workers import from; what was imported of it is forgotten with the test."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(**modules: str) -> None:
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


def lines(folder: Path, name: str) -> list[str]:
    """Lines of a file that workers append to, as far as it is there."""
    file = folder / name
    return file.read_text().splitlines() if file.exists() else []


class LightDaemon(Daemon):
    """An agent whose zygotes preload no torch, or a master."""

    def __init__(
        self, module: str, arguments: Sequence[str], log_file: Path, env: Mapping[str, str], *, has_input: bool = False
    ) -> None:
        if module == "unified_agent":
            arguments = [*arguments, "--worker-entry", "light_worker:main"]
            env = {**env, "PYTHONPATH": f"{PROGRAMS}:{env.get('PYTHONPATH', '')}".rstrip(":")}
        super().__init__(module, arguments, log_file, env, has_input=has_input)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For jobs that need none: preloading it takes each agent more than a second."""
    monkeypatch.setattr("unified.client.embedded.Daemon", LightDaemon)


@contextlib.contextmanager
def memory_group(max_bytes: int) -> Iterator[Path]:
    """A control group with little memory, where this process may make one."""
    counter = cgroups.oom_counter(Path("/proc/self"))
    if counter is None:
        pytest.skip("the kernel's out-of-memory kills cannot be read here")
    group = counter.parent / f"unified-test-{os.getpid()}"
    limit = "memory.max" if counter.name == "memory.events" else "memory.limit_in_bytes"
    try:
        group.mkdir()
        (group / limit).write_text(str(max_bytes))
    except OSError as error:
        pytest.skip(f"no control group can be made in {counter.parent}: {error.strerror}")
    try:
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), timeout=100)
        group.rmdir()
