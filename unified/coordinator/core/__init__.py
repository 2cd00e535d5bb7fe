"""The coordinator's core: workers, barriers, datasets and checkpoints of any number of spaces."""
