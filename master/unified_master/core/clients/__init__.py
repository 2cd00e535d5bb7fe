"""Answers to clients: the state of jobs and nodes, and its changes."""
