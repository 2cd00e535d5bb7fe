"""The queue of jobs, and the placement of their workers on nodes."""
