"""Servers for suites: one at a time, with the model name that a suite expects.

It runs in a suite's own environment, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import dataclass

COMMAND = "SPECSERVE_COMMAND"
"""Environment variable with the command that serves, which takes --port and --set."""
URL = "SPECSERVE_URL"
"""Environment variable with the URL of a server that runs; none is started where it is set."""
OPTIONS = ("--set=cache.pages=600",)
CHATS = ("--set=limits.max_context=1024",)
"""SmolLM2, which may write until its context ends."""
LONG_CHATS = ("--set=limits.max_context=4096",)
PAIR = ("--set=demo.size=none",)
"""The demo pair, which goes on with any text, where SmolLM2 may end at once."""
READY_WITHIN_S = 300.0
VOCABULARY = 49152
"""Tokens of SmolLM2."""


@dataclass(slots=True)
class Servers:
    """The server that runs now. Another model name or other options stop it and start a new one."""

    model: str | None = None
    options: tuple[str, ...] = CHATS
    url: str = ""
    process: subprocess.Popen[bytes] | None = None

    def open(self, model: str | None = None, options: tuple[str, ...] | None = None) -> str:
        """Return the URL of a server of that model name and options; None takes what runs."""
        wanted = (model or self.model or "any", self.options if options is None else options)
        if URL in os.environ:
            self.model, self.url = wanted[0], os.environ[URL]
        elif self.process is None or wanted != (self.model, self.options):
            self.close()
            self.model, self.options = wanted
            self._start()
        return self.url

    def close(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(READY_WITHIN_S)
            self.process = None

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [*shlex.split(os.environ[COMMAND]), "--port", str(port)]
        command += [f"--set=model={self.model}", *OPTIONS, *self.options]
        environment = os.environ | {"RAY_AUTH_MODE": "token"}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        begun = time.monotonic()
        while not _is_ready(self.url, self.model):
            if self.process.poll() is not None or time.monotonic() - begun > READY_WITHIN_S:
                self.close()
                raise RuntimeError(f"no server after {time.monotonic() - begun:.0f} s")
            time.sleep(0.2)


def _is_ready(url: str, model: str | None) -> bool:
    """Return whether a token is written."""
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=READY_WITHIN_S):
        return True
    return False
