"""The two real workers among the simulated ones: one calls the other, when it is told to."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

from benchmarks.bus import work
from unified import RoleActor, RoleGroup, current_worker, rpc

CALLS = 5_000
READINGS = 9
"""Of so many calls each; their medians count."""
WAIT_S = 120.0


class Callee:
    @rpc
    def nop(self) -> None:
        return None


class Caller:
    """Waits for the file `go`, calls, writes `figures`."""

    def run(self) -> None:
        folder = Path(current_worker().job_info.user_config.folder)
        callee = RoleGroup("callee")[0]
        began = time.perf_counter()
        simulated = len(RoleGroup("sim", optional=True))
        group_s = time.perf_counter() - began
        while not (folder / "go").exists():
            time.sleep(0.05)  # a file of another process
        for _ in range(work.WARM_UP_CALLS):
            callee.call("nop").result(WAIT_S)
        p50, p99 = map(statistics.median, zip(*(reading(callee) for _ in range(READINGS)), strict=True))
        figures = {"p50_us": p50, "p99_us": p99, "simulated": simulated, "group_ms": group_s * 1e3}
        (folder / "figures.part").write_text(json.dumps(figures))
        (folder / "figures.part").rename(folder / "figures")


def reading(callee: RoleActor) -> tuple[float, float]:
    return work.percentiles_us(work.seconds(lambda: callee.call("nop").result(WAIT_S)) for _ in range(CALLS))
