"""A worker for tests of the fork server: it answers questions about its process."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection

IMPORTED_BY = os.getpid()


def work(connection: Connection) -> None:
    """Answer with facts about this process, or run the command, until the connection ends."""
    while True:
        match connection.recv():
            case "process":
                connection.send((os.getpid(), os.getppid(), IMPORTED_BY))
            case "variable", name:
                connection.send(os.environ.get(name))
            case "imported", module:
                connection.send(module in sys.modules)
            case "print", text:
                print(text, flush=True)
                connection.send(None)
            case "sleep":
                time.sleep(3600)
