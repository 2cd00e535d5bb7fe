"""Daemons of a test."""

from tests.support.master_process import start_master

__all__ = ["start_master"]
