"""The side of the workers: a state as one block of bytes, and the connection to the server of the node."""
