"""For every test: what the agent gives its workers, given to the test process itself."""

import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests.support.packages import install

# No deadline, no `too_slow`: how long an example takes says how busy the machine is. A process of the suite that gets
# no processor for a quarter of a second failed whatever property it was testing. `make test` decides: its examples are
# the same each time. `make test-all` explores: other and more examples in each run. A failure prints how to repeat it.
common = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True, derandomize=False
)
hypothesis.settings.register_profile("explore", common)
hypothesis.settings.register_profile("decide", common, derandomize=True, database=None, max_examples=50)
hypothesis.settings.load_profile("decide")

# torch's TCPStore looks up its peers' names; a packet that the name server loses would cost 5 s (see RESOLVER in
# unified_agent.environment). Set here, before anything resolves a name.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# gRPC makes its descriptors anew whenever the process forks, which other tests then take for something left behind.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A tester who has a cluster of their own has a key, which the clusters of these tests have not.
os.environ["UNIFIED_KEY_FILE"] = ""

# Nor is the cluster that a tester has up (`unified up`) for the jobs of these tests.
os.environ.setdefault("UNIFIED_MASTER", "")

# A shell that starts this in the background has it ignore interrupts, which some tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    # Hypothesis also draws constants of the modules that are loaded, so the tests before would change the examples.
    if config.getoption("hypothesis_profile") != "explore":
        providers._get_local_constants = lambda: providers._local_constants


STARTS_PROGRAMS = {"s3_server", "start_gateway", "start_master"}
"""Fixtures that start programs: a test that uses one is of the `processes`."""


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if STARTS_PROGRAMS & {*getattr(item, "fixturenames", ())}:
            item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and thousands of tests are all kept; looking for garbage among them would take a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is there now, torch's modules and thousands of tests, lives to the end: no collection need look at it again.

    `Belongings` collects before and after each test that uses it, which took 0.4 s each time.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("netns") and (why := why_no_namespaces()):
        pytest.skip(why)


@functools.cache
def why_no_namespaces() -> str:
    """Why no network namespace can be made here; empty if one can."""
    missing = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if missing and (os.geteuid() != 0 or shutil.which("apt-get") is None or install(["iproute2", "util-linux"])):
        return f"network namespaces need {', '.join(missing)}, which cannot be installed here"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespace can be made: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(autouse=True)
def no_worker_info_is_left() -> Iterator[None]:
    """What torch takes this process for, a worker of a DataLoader, is seen by every later test."""
    yield
    module: Any = sys.modules.get("torch.utils.data._utils.worker")
    if module is not None and module._worker_info is not None:
        module._worker_info = None
        pytest.fail("the test has left torch's worker info behind")


@pytest.fixture(autouse=True)
def no_variable_is_left() -> Iterator[None]:
    """A variable such as UNIFIED_CONNECT_S would change every later test of this process."""
    before = variables()
    yield
    if (after := variables()) != before:
        for name in before.keys() | after.keys():
            os.environ.pop(name, None)
        os.environ.update(before)
        changed = ", ".join(sorted({name for name, _ in before.items() ^ after.items()}))
        pytest.fail(f"the test has left other variables behind: {changed}")


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("UNIFIED_")}
