"""Checkpoints that several ranks save and load together."""
