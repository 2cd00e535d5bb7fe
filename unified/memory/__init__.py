"""Memory of the host: parallel copies, and buffers that are used again."""
