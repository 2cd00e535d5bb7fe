"""Freed memory is kept for the next array, as far as was asked."""

import subprocess
import sys
import textwrap

import pytest

from unified.errors import OptionError
from unified.worker.fork_setup import keep_freed

PROGRAM = """
    import resource, threading
    import numpy as np
    from unified.worker.fork_setup import keep_freed

    print(keep_freed({"UNIFIED_KEEP_FREED_MB": %r}))

    def work():
        np.ones(64 << 20, np.uint8)  # what is touched here is freed at once
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            np.ones(64 << 20, np.uint8)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def faults(kept_mb: str) -> tuple[int, int]:
    """What was kept, and pages that had to be made for four arrays of 64 MiB."""
    program = textwrap.dedent(PROGRAM % kept_mb)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    kept, count = done.stdout.split()
    return int(kept), int(count)


def test_arrays_of_a_thread_find_memory_that_is_there() -> None:
    kept, count = faults("512")
    if kept == 0:
        pytest.skip("another C library")
    assert kept == 512
    assert count < faults("0")[1] / 4


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(OptionError, match="'lots' is not a number of MiB"):
        keep_freed({"UNIFIED_KEEP_FREED_MB": "lots"})


LIBRARIES = """
    import numpy as np
    from unified.worker.fork_setup import give_back_idle

    def resident_kb():
        return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Pss_File:"))

    assert np.linalg.inv(np.eye(100)).sum() == 100
    before = resident_kb()
    give_back_idle()
    print(before, resident_kb())
    assert np.linalg.inv(2 * np.eye(100)).sum() == 50
    give_back_idle()
"""


def test_pages_of_libraries_are_given_back_and_read_anew() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIBRARIES)], capture_output=True, text=True, check=True, timeout=100
    )
    before, after = (int(word) for word in done.stdout.split())
    assert after < before / 2
