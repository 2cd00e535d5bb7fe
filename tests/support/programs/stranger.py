"""A peer without the key at a tcp port: greets as ZeroMQ does, claims a long frame on each connection, sends of it.

Arguments: address, mechanism, connections, bytes claimed, bytes sent on each at most. Says when it is done, then for
each line of its stdin how many connections are left.
"""

import contextlib
import socket
import struct
import sys

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00%s" + b"\0" * 32
BLOCK = b"x" * 65536


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def main() -> None:
    address, mechanism, *numbers = sys.argv[1:]
    num_connections, claimed, most = map(int, numbers)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    opened = [socket.create_connection((host, int(port))) for _ in range(num_connections)]
    left = dict.fromkeys(opened, most)
    for connection in opened if claimed else ():
        with contextlib.suppress(OSError):  # it was ended already
            connection.sendall(GREETING % mechanism.encode().ljust(20, b"\0") + b"\x02" + struct.pack(">Q", claimed))
    while left:
        for connection in list(left):
            try:
                left[connection] -= connection.send(BLOCK[: left[connection]])
            except OSError:
                left[connection] = 0
            if not left[connection]:
                del left[connection]
    print("done", flush=True)
    for _ in sys.stdin:
        print(sum(map(is_open, opened)), flush=True)


if __name__ == "__main__":
    main()
