"""Unified on Kubernetes, without an operator: options to manifests, and what runs in the pods of a single run."""
