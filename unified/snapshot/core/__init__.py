"""Decisions about snapshots: which buffer is written next, and which snapshot all ranks go back to. No I/O."""
