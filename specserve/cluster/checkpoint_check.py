"""Check the files that a config names in a forked process, while this one starts Ray.

This process imports neither torch nor transformers, and the workers need the same fork server soon.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator

from specserve.cluster.engine import fork_server
from specserve.cluster.engine.worker_host import modelling_modules
from specserve.config.tree import Config
from specserve.errors import Unavailable


@contextlib.contextmanager
def checkpoint_check(config: Config) -> Iterator[Callable[[], None]]:
    """Begin the check, and yield a function that waits for it and raises what it has found.

    A Ray that is started meanwhile hands the key of the fork server on to its processes.
    """
    key = os.environ[fork_server.KEY_VARIABLE] = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, fork_server.KEY_VARIABLE)
        connections = []
        for part in config.each_model:
            modules = list(modelling_modules(part))
            connection = fork_server.fork(key, modules, parent_pid=os.getpid())
            stack.callback(connection.close)
            connection.send(("find_checkpoints", (part,)))
            connections.append(connection)
        if config.models and config.shares_drafts:
            connections.append(connections[-1])  # which answers a second time
            connections[-1].send(("require_shared_tokenizers", (config,)))

        def wait() -> None:
            for connection in connections:
                try:
                    found = connection.recv()
                except (EOFError, OSError) as error:
                    raise Unavailable(
                        "the models' files could not be checked; see the lines above"
                    ) from error
                if isinstance(found, Exception):
                    raise found

        yield wait
