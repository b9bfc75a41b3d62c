"""Whether the server could listen where it is to, and whether Serve's HAProxy could beside it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping

from specserve.config.tree import Http
from specserve.tools.doctor.findings import Finding, bad, ok


def http(asked: Http) -> Iterator[Finding]:
    where, trouble = f"{asked.host}:{asked.port}", why_not(asked.host, asked.port)
    if trouble is None:
        yield ok("http port", f"{where} is free")
    elif trouble.errno == errno.EADDRINUSE:
        yield bad(
            "http port",
            f"{where} is taken",
            "end what listens there (`ss -ltnp` names it), or choose another with --port or http.port",
        )
    elif trouble.errno == errno.EACCES:
        yield bad(
            "http port",
            f"{where} is not yours to listen on",
            "ports below 1024 are the administrator's: choose another with --port",
        )
    else:
        yield bad(
            "http port",
            f"{where}: {trouble.strerror or trouble}",
            "http.host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0",
        )


def proxy(ports: Mapping[str, int]) -> Iterator[Finding]:
    """Its own, by the variables that name them: it listens there on all interfaces."""
    for variable, port in ports.items():
        trouble = why_not("0.0.0.0", port)
        if trouble is None:
            yield ok("HAProxy's port", f"{port} is free")
        else:
            yield bad(
                "HAProxy's port",
                f"{port}: {trouble.strerror}",
                f"end what listens there, or set {variable} to another before Ray starts",
            )


def why_not(host: str, port: int) -> OSError | None:
    """Why nobody could listen there now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None
