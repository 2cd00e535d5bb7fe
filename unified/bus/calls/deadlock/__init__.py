"""Distributed deadlock detection on the waits-for graph."""
