"""TCP ports that a program under test is told to listen on."""

import random
import socket
from pathlib import Path


def unused_port() -> int:
    """Return a port that the kernel gives to nobody before the program listens on it.

    A port that the kernel gave out for port 0 and that is closed again may be given to the next connection of any
    process. So the port is one of the 10 000 below those that the kernel gives out, chosen at random, and nothing
    listens on it.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(1024, end - 10_000), end)
    for port in random.sample(ports, len(ports)):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError(f"all ports of {ports} are in use")
