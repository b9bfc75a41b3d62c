"""Check that the server of this container takes requests, for the image's HEALTHCHECK.

Process 1 has the command line of `specserve serve`, which says where the server listens.
"""

from __future__ import annotations

import ssl
import sys
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

from specserve.cli.arguments import build_parser
from specserve.cli.config_options import config_from_options
from specserve.config.sections import HttpConfig

COMMAND_LINE = Path("/proc/1/cmdline")
TIMEOUT_S = 8.0
"""More than the 5 s after which `/ready` gives up on an engine."""
NEEDS_KEY = 401
"""A gateway answers that, and the check has no key."""


def main(command_line: Path = COMMAND_LINE) -> None:
    """Exit with 1 and the reason unless the server is ready."""
    try:
        status = _status(_http_config(command_line))
    except OSError as error:
        sys.exit(f"the server does not answer: {error}")
    if status not in (200, NEEDS_KEY):
        sys.exit(f"/ready answers {status}")


def _http_config(command_line: Path) -> HttpConfig:
    words = command_line.read_text(encoding="utf-8").split("\0")[:-1]
    names = [Path(word).name for word in words]
    if "specserve" not in names:
        sys.exit("process 1 does not run specserve")
    options = build_parser().parse_args(words[names.index("specserve") + 1 :])
    if options.command != "serve":
        sys.exit(f"process 1 runs `specserve {options.command}`, which serves nothing")
    return config_from_options(options).http


def _status(http: HttpConfig) -> int:
    """Return the status of `/ready`. The certificate is for a name, and not for this address."""
    connection = (
        HTTPConnection(http.host, http.port, timeout=TIMEOUT_S)
        if http.tls_cert is None
        else HTTPSConnection(
            http.host, http.port, timeout=TIMEOUT_S, context=ssl._create_unverified_context()
        )
    )
    addressed = {"Host": http.hosts[0]} if http.hosts else {}
    connection.request("GET", f"{http.root_path}/ready", headers=addressed)
    return connection.getresponse().status


if __name__ == "__main__":
    main()
