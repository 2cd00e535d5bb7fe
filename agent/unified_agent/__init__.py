"""The node daemon: starts, watches and stops one node's workers."""
