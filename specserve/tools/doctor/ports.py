"""Findings about the ports of the server and of Serve's HAProxy."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping

from specserve.config.sections import HttpConfig
from specserve.tools.doctor.findings import Finding, bad, ok


def http(config: HttpConfig) -> Iterator[Finding]:
    """Check that the server can listen on its address."""
    where, error = f"{config.host}:{config.port}", bind_error(config.host, config.port)
    if error is None:
        yield ok("http port", f"{where} is free")
    elif error.errno == errno.EADDRINUSE:
        yield bad(
            "http port",
            f"{where} is taken",
            "end what listens there (`ss -ltnp` names it), or choose another with --port or "
            "http.port",
        )
    elif error.errno == errno.EACCES:
        yield bad(
            "http port",
            f"{where} is not yours to listen on",
            "ports below 1024 are the administrator's: choose another with --port",
        )
    else:
        yield bad(
            "http port",
            f"{where}: {error.strerror or error}",
            "http.host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0",
        )


def proxy(ports: Mapping[str, int]) -> Iterator[Finding]:
    """Check the ports of Serve's proxies that variables set; the others are chosen free."""
    for variable, port in ports.items():
        error = bind_error("0.0.0.0", port)
        if error is None:
            yield ok(variable, f"{port} is free")
        else:
            yield bad(
                variable,
                f"{port}: {error.strerror}",
                f"leave {variable} out, and a free port is chosen; or set it to another",
            )


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error of listening there now, or None."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
