"""For every test: what the agent gives its workers, given to the test process itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# torch's TCPStore looks up its peers' names; a packet that the name server loses would cost 5 s (see RESOLVER in
# unified_agent.environment). Set here, before anything resolves a name.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# A tester who has a cluster of their own has a key, which the clusters of these tests have not.
os.environ["UNIFIED_KEY_FILE"] = ""

# A shell that starts this in the background has it ignore interrupts, which some tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_worker_info_is_left() -> Iterator[None]:
    """What torch takes this process for, a worker of a DataLoader, is seen by every later test."""
    yield
    module: Any = sys.modules.get("torch.utils.data._utils.worker")
    if module is not None and module._worker_info is not None:
        module._worker_info = None
        pytest.fail("the test has left torch's worker info behind")
