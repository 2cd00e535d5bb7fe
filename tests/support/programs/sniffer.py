"""Listens to all that crosses a loopback interface until stdin ends; prints which of its arguments it saw, as JSON."""

import json
import select
import socket
import sys

ALL_PROTOCOLS = 3


def main() -> None:
    wanted = [word.encode() for word in sys.argv[1:]]
    seen: set[str] = set()
    num_packets = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as ear:
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        ear.bind(("lo", 0))
        print("listening", flush=True)
        while True:
            ready, _, _ = select.select([ear, sys.stdin], [], [])
            if ear in ready:
                packet = ear.recv(1 << 17)
                num_packets += 1
                seen |= {word.decode() for word in wanted if word in packet}
            elif sys.stdin.read(1) == "":
                break
    print(json.dumps({"packets": num_packets, "seen": sorted(seen)}))


if __name__ == "__main__":
    main()
