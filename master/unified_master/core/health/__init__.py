"""Health of running roles and their nodes: hangs, stacks, node checks."""
