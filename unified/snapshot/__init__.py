"""Snapshots of training states in memory that outlives the worker, and by copies on other nodes its node."""
