"""The coordinator of data workers: who is there, barriers, shards and checkpoints; and its clients."""
