"""Tensors in memory: walks of a state, copies by several threads, and buffers that are used again."""
