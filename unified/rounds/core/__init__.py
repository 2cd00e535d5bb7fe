"""Decisions about rounds, without I/O."""
