"""The coordinator of data workers: presence, barriers, shards and checkpoints; and its clients."""
