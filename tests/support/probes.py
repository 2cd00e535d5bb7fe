"""Requests to a daemon's probes, as a kubelet sends them."""

import socket

REQUEST = "GET {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: kube-probe/1.37\r\nAccept: */*\r\nConnection: close\r\n\r\n"


def ask(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """Return everything that comes back for these bytes."""
    with socket.create_connection((host, port), 60) as connection:
        connection.sendall(request)
        found = b""
        while data := connection.recv(65536):
            found += data
        return found


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Return the status and the text of a GET."""
    head, _, body = ask(port, REQUEST.format(path, host).encode(), host).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    return int(head.split()[1]), body.decode().strip()


def get_or_none(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str] | None:
    """Return the same, or None where nobody listens yet."""
    try:
        return get(port, path, host)
    except OSError:
        return None
