"""Serialization of arguments and results: a msgpack body, and large buffers beside it."""
