"""Find out a client's address, for the access log. Knows no keys."""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import Scope

FORWARDED_FOR = "x-forwarded-for"
UNKNOWN = "-"
_PORT = re.compile(r"^(?:\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[^:]*):\d+)$")


def client_address(scope: Scope, *, trusted_proxies: int) -> str:
    """Return the address of the client, or UNKNOWN.

    Each of the trusted proxies appends the address that called it to `X-Forwarded-For`, so
    the outermost one's entry is that many from the end; what stands before it is the client's word.
    Without trusted proxies the address is the connection's. A header is then the client's alone,
    and uvicorn may have taken it for the connection's address, so that neither is known.
    """
    values = Headers(scope=scope).getlist(FORWARDED_FOR)
    if not trusted_proxies:
        peer = scope.get("client")
        return UNKNOWN if values or not peer else _parsed(peer[0])
    entries = ",".join(values).split(",")
    return _parsed(entries[-trusted_proxies]) if len(entries) >= trusted_proxies else UNKNOWN


def _parsed(text: str) -> str:
    """Return an address in its usual spelling; a log quotes nothing else of what arrives."""
    text = text.strip()
    if (with_port := _PORT.match(text)) is not None:
        text = with_port["six"] or with_port["four"] or ""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return UNKNOWN
