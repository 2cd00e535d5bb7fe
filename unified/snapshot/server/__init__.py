"""The side of the node: a process of its own, which keeps buffers, copies them to partners and has them written."""
