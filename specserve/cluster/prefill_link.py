"""Calls of an engine to the prefill engines of its model, which Serve routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from specserve.cluster.prompt_pages import Fetch, PagePiece, WantedPages
from specserve.errors import SpecserveError, WorkerLost, first_line


def fetch_from(prefill: Any) -> Fetch:
    """Return what fetches pages by the handle of the prefill engines."""

    async def fetch(wanted: WantedPages) -> AsyncGenerator[PagePiece, None]:
        pieces = prefill.prefill.options(stream=True).remote(wanted)
        try:
            async for piece in pieces:
                yield piece
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, SpecserveError):
                raise cause from error
            raise WorkerLost(f"a prefill engine failed: {first_line(cause or error)}") from error
        except (RayError, RayServeException) as error:
            raise WorkerLost(f"a prefill engine is away: {type(error).__name__}") from error
        finally:
            pieces.cancel()

    return fetch
