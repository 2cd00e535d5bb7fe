"""Transport of messages: routes, framing, Unix and ZeroMQ connections, I/O threads."""
