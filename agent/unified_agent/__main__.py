"""``python -m unified_agent [FLAGS]``, or, before the driver of an embedded cluster knows what the node offers:

    python -m unified_agent --early PID NODE [FLAGS]

The zygote then starts at once: its import of torch takes longer than all other steps before the first worker runs.
The driver, `PID`, writes the other flags to stdin, as a line of JSON.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from unified import process
from unified.config import settings


def start_early() -> int:
    """Start the zygote, import the agent meanwhile, and run it with the flags from stdin; return its exit code."""
    from unified_agent import spawn

    parent, node, *flags = int(sys.argv[2]), *sys.argv[3:]
    process.die_with_parent(signal.SIGTERM, parent)
    incarnation = os.urandom(8).hex()
    run_dir = spawn.run_folder(settings.make_run_root(settings.BELOW_AGENT), incarnation)
    given = dict(itertools.pairwise(flags))
    entry, preload = given.get(spawn.ENTRY_FLAG, spawn.ENTRY), given.get(spawn.PRELOAD_FLAG)
    env = spawn.child_environment(os.environ, node, incarnation)
    zygote = spawn.spawn_zygote(settings.python(), entry, run_dir, env, 1, [preload] if preload else [])
    import json  # meanwhile

    from unified_agent import cli

    line = sys.stdin.readline()
    return (
        cli.main([*flags, *json.loads(line)], spawn.EarlyStart(incarnation, zygote)) if line else 0
    )  # no line: the driver has ended


if __name__ == "__main__":
    if sys.argv[1:2] == ["--early"]:
        sys.exit(start_early())
    from unified_agent.cli import main

    sys.exit(main())
