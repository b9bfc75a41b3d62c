"""The check of a container's health asks the server where its command line says that it listens."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from specserve.cli.health_check import main

STATUS = "status"


class Handler(BaseHTTPRequestHandler):
    """Answers /mine/ready, addressed to my.example, with the status that its server has."""

    def do_GET(self) -> None:
        asked = (self.path, self.headers["Host"])
        known = asked == ("/mine/ready", "my.example")
        self.send_response(getattr(self.server, STATUS) if known else 421)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def server(status: int = 200, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Yield the port of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        setattr(found, STATUS, status)
        if tls is not None:
            found.socket = tls.wrap_socket(found.socket, server_side=True)
        threading.Thread(target=found.serve_forever, daemon=True).start()
        try:
            yield found.server_port
        finally:
            found.shutdown()


def command_line(folder: Path, *arguments: str) -> Path:
    """Write what /proc has of process 1 when docker has put an init of its own before ours."""
    file = folder / "cmdline"
    init = ("/sbin/docker-init", "--", "tini", "--", "specserve")
    file.write_text("".join(f"{word}\0" for word in (*init, *arguments)), encoding="utf-8")
    return file


def serving(folder: Path, port: int, *arguments: str) -> Path:
    """Write the command line of a server whose address is partly in its config."""
    (folder / "my.yaml").write_text(
        f"http: {{port: {port}, root_path: /mine, hosts: [my.example]}}\n", encoding="utf-8"
    )
    config = str(folder / "my.yaml")
    return command_line(folder, "serve", "--config", config, "--host", "0.0.0.0", *arguments)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for another name than that of the loopback, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "my.example")])
    now = datetime.now(UTC)
    signed = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
    ).sign(key, hashes.SHA256())
    encoded, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(encoded, serialization.PrivateFormat.PKCS8, plain)
    files = folder / "cert.pem", folder / "key.pem"
    for file, pem in zip(files, (signed.public_bytes(encoded), private), strict=True):
        file.write_bytes(pem)
    return files


@pytest.mark.parametrize("status", [200, 401])
def test_a_server_is_found_at_the_port_and_the_path_of_its_config(
    status: int, tmp_path: Path
) -> None:
    with server(status) as port:
        main(serving(tmp_path, port))
    with server(status) as port:
        main(serving(tmp_path, 1, "--port", str(port)))


def test_a_server_with_tls_is_asked_with_tls_whatever_name_its_certificate_has(
    tmp_path: Path,
) -> None:
    cert, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    settings = ("--set", f"http.tls_cert={cert}", "--set", f"http.tls_key={key}")
    with server(tls=tls) as port:
        main(serving(tmp_path, port, *settings))
        with pytest.raises(SystemExit, match="does not answer"):
            main(serving(tmp_path, port))


def test_a_server_that_is_not_ready_or_not_there_is_reported_with_the_reason(
    tmp_path: Path,
) -> None:
    with server(503) as port, pytest.raises(SystemExit, match="/ready answers 503"):
        main(serving(tmp_path, port))
    with pytest.raises(SystemExit, match=r"does not answer: .*refused"):
        main(serving(tmp_path, port))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["doctor"], "`specserve doctor`, which serves nothing"), ([], "does not run specserve")],
)
def test_a_container_without_a_server_is_not_healthy(
    arguments: list[str], why: str, tmp_path: Path
) -> None:
    file = command_line(tmp_path, *arguments)
    if not arguments:
        file.write_text("python\0my.py\0", encoding="utf-8")
    with pytest.raises(SystemExit, match=why):
        main(file)
