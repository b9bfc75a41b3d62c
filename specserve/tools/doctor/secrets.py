"""The files that a config names beside the models: API keys and TLS. Reads keys only as the server does, and says none of them."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from specserve.api.keys import Keys
from specserve.config.tree import Http
from specserve.tools.doctor.findings import Finding, bad, ok, warn

OTHERS = stat.S_IRWXG | stat.S_IRWXO
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def keys(asked: Http) -> Iterator[Finding]:
    if asked.api_keys_file is None:
        if asked.host in LOOPBACK:
            yield ok("API keys", f"none are asked for; only this machine reaches {asked.host}")
        else:
            yield warn(
                "API keys",
                f"none are asked for, and {asked.host} may be reached from elsewhere",
                "name a file of keys in http.api_keys_file",
            )
        return
    file = Path(asked.api_keys_file)
    found = Keys.read(file)
    yield from _private("API keys", file, f"{len(found)} in {file}")


def tls(asked: Http) -> Iterator[Finding]:
    if asked.tls_cert is None or asked.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            asked.tls_cert, asked.tls_key
        )
    except (OSError, ssl.SSLError) as error:
        yield bad(
            "TLS",
            f"{asked.tls_cert}, {asked.tls_key}: {error}",
            "both must be PEM files, the key without a password and that of the certificate",
        )
        return
    yield from _private("TLS", Path(asked.tls_key), f"{asked.tls_cert} and its key")


def _private(subject: str, file: Path, found: str) -> Iterator[Finding]:
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & OTHERS:
        yield warn(subject, f"{found}; others may read it (mode {mode:03o})", f"chmod 600 {file}")
    else:
        yield ok(subject, found)
