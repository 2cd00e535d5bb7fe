"""Snapshots of training states, in memory that outlives the worker. Copies on other nodes outlive the node."""
