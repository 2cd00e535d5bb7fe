"""Measurements of workers: evidence of their ends, and metrics for Prometheus."""
