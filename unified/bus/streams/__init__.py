"""Streams of results: the caller's stream and the handler's generator."""
