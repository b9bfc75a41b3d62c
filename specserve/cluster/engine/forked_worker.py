"""The process of a worker, forked from the fork server: it answers its host until it runs.

Importing this module imports all that a worker needs.
"""

from __future__ import annotations

import logging
import pickle
from multiprocessing.connection import Connection
from typing import Any

from ray._raylet import setproctitle  # type: ignore[attr-defined]

from specserve.checkpoint_files import find_checkpoints
from specserve.cluster.engine.workers import DraftWorker, TargetWorker
from specserve.config.features import part
from specserve.errors import ModelError, SpecserveError
from specserve.models.cpu.linear_kernels import compile_ahead

compile_ahead()  # half a second that workers need not spend

log = logging.getLogger(__name__)

KINDS: dict[str, type[TargetWorker] | type[DraftWorker]] = {
    kind.__name__: kind for kind in (TargetWorker, DraftWorker)
}


def work(connection: Connection) -> None:
    """Make the requested worker, call its methods on request, and run it at last.

    The title of the process says which method runs, as the titles of Ray's processes do.
    """
    worker: Any = None
    kind = ""
    while True:
        try:
            method, arguments = connection.recv()
        except ConnectionError:  # the host has gone, with a result that it did not read
            raise EOFError from None
        kind = method if method in KINDS else kind
        setproctitle(f"ray::{kind}.{method}")
        if method == "run":
            worker.run()
            return
        try:
            if method == "find_checkpoints":
                find_checkpoints(*arguments)
                result: object = None
            elif method == "require_shared_tokenizers":
                part("draft_pools.tokenizers:require_shared_tokenizers")(*arguments)
                result = None
            elif method in KINDS:
                worker = KINDS[method](*arguments)
                result = worker.hello()
            else:
                result = getattr(worker, method)(*arguments)
        except SpecserveError as error:  # the host says what it says
            result = _portable(error)
        except Exception as error:
            log.exception("%s failed", method)
            result = _portable(error)
        connection.send(result)


def _portable(error: Exception) -> Exception:
    """Return the error, or one in its place if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ModelError(f"{type(error).__name__}: {error}")
    return error
