"""Shared memory between the processes of a host: segments, slots, export and borrowing."""
