"""A run as an object of Kubernetes: its manifest, its state, its logs, and the client of the API server."""
