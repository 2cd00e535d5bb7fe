"""Launcher command lines that are read with our own table of options, also where torch is installed."""

from unittest.mock import patch

from unified.api.builder import DLJobBuilder, launcher


def read_by_table(cmd: str) -> DLJobBuilder:
    """Return a builder of the job that a command line of `torchrun` or `dlrover-run` describes."""
    with patch.object(launcher, "find_spec", return_value=None):
        return DLJobBuilder().by_dlrover_run_cmd(cmd)
