"""Ports that a test tells a process by number."""

import socket


def reserved_port() -> int:
    """A port of 127.0.0.1 that nobody gets who takes any free one, until this process ends.

    A port that was found free and let go may be somebody else's a moment later: tests run side by side, and each of
    their connections takes a port too. So a socket stays bound to it that never listens. Whoever asks for the port by
    its number gets it all the same: Linux lets several sockets with SO_REUSEADDR bind one address while none of them
    listens, and asyncio, libuv (the store of torch) and Go set it for every server.
    """
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("127.0.0.1", 0))
        port: int = reserving.getsockname()[1]
        reserving.detach()
    return port
