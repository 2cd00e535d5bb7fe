"""Unified on Kubernetes, without an operator: manifests from options, and the program in the pods of a single run."""
