"""Sockets that listen for everybody: on IPv4 alone, on IPv6 alone, and on both, as the machine has them."""

import errno
import socket

EVERYWHERE = "::"
"""All addresses of both families. Where there is no IPv6: all of IPv4."""


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: an address, or EVERYWHERE.
        port: 0 takes a free one.

    Raises:
        OSError: nobody can listen there.
        OverflowError: that is no port.
    """
    if host != EVERYWHERE:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                (EVERYWHERE, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except OSError as error:
            # The kernel knows IPv6, and this machine or container has none.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=backlog)


def endpoint(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
