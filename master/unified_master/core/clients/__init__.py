"""Answers to clients: the state of jobs and nodes, and what changed of it."""
