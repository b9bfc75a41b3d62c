"""Findings about API keys and TLS files. Reads keys as the server does and prints none."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from specserve.api.keys import ApiKeys
from specserve.config.sections import HttpConfig
from specserve.tools.doctor.findings import Finding, bad, ok, warn

OTHERS = stat.S_IRWXG | stat.S_IRWXO
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def keys(config: HttpConfig) -> Iterator[Finding]:
    """Check the file of API keys, and that a public address has one."""
    if config.api_keys_file is None:
        if config.host in LOOPBACK:
            yield ok("API keys", f"none are asked for; only this machine reaches {config.host}")
        else:
            yield warn(
                "API keys",
                f"none are asked for, and {config.host} may be reached from elsewhere",
                "name a file of keys in http.api_keys_file",
            )
        return
    file = Path(config.api_keys_file)
    found = ApiKeys.from_file(file)
    yield from _private("API keys", file, f"{len(found)} in {file}")


def tls(config: HttpConfig) -> Iterator[Finding]:
    """Check that certificate and key can be loaded together."""
    if config.tls_cert is None or config.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_cert, config.tls_key
        )
    except (OSError, ssl.SSLError) as error:
        yield bad(
            "TLS",
            f"{config.tls_cert}, {config.tls_key}: {error}",
            "both must be PEM files, the key without a password and that of the certificate",
        )
        return
    yield from _private("TLS", Path(config.tls_key), f"{config.tls_cert} and its key")


def _private(subject: str, file: Path, found: str) -> Iterator[Finding]:
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & OTHERS:
        yield warn(subject, f"{found}; others may read it (mode {mode:03o})", f"chmod 600 {file}")
    else:
        yield ok(subject, found)
