"""Paths of OpenAI's API that a server of text cannot have, and their refusal. Reads no bodies."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from specserve.api.response_items.body import NO_STATE

TEXT_ONLY_PATHS = (
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/audio/{rest:path}",
    "/v1/images/{rest:path}",
    "/v1/videos",
)

STORED_RESPONSES = "/v1/responses/{rest:path}"


async def nothing_stored() -> Response:
    """Refuse to look up an earlier response, in words."""
    raise HTTPException(404, f"there are no stored responses: {NO_STATE}")


async def text_only(request: Request) -> Response:
    """Refuse with 404, in words."""
    raise HTTPException(
        404,
        f"{request.url.path} is not served: this server writes text only, by /v1/completions, "
        "/v1/chat/completions, /v1/responses and /v1/messages; other media and embeddings need "
        "another model server",
    )
