"""Middleware that asks for API keys, by the scopes that paths need, and applies their limits."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.api.access import ClientAccess
from specserve.api.keys import ADAPTERS, GENERATE, METRICS, TRACE, ApiClient
from specserve.api.middleware import served_path
from specserve.api.refusal import BAD_KEY, MISSING_SCOPE, Refusal
from specserve.errors import RateLimited, Unavailable

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SCOPES_OF_PATHS = {
    "/trace": TRACE,
    "/metrics": METRICS,
    LOAD_ADAPTER: ADAPTERS,
    UNLOAD_ADAPTER: ADAPTERS,
    "/health": None,
    "/ping": None,
    "/ready": None,
    "/version": None,
}
"""Scopes that keys need for paths that are not open; all others need GENERATE, probes none."""


class KeyCheck:
    """Check of the key on all but the open paths, and of each key's limits.

    It comes as `Authorization: Bearer KEY`, or as `X-Api-Key: KEY` from clients of Anthropic's API.
    """

    def __init__(self, app: ASGIApp, *, access: ClientAccess, open_paths: Collection[str]) -> None:
        self._app, self._access, self._open_paths = app, access, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or served_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            client = self._find(scope)
        except Unavailable as error:
            await Refusal.from_error(error).response()(scope, receive, send)
            return
        if client is None:
            refusal = Refusal(BAD_KEY, "an API key is needed: Authorization: Bearer KEY")
            await refusal.response({"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["client"] = client.name
        needed = SCOPES_OF_PATHS.get(served_path(scope), GENERATE)
        if needed is not None and needed not in client.scopes:
            message = (
                f"this key is not for {served_path(scope)[:200]}; that needs the scope {needed}"
            )
            await Refusal(MISSING_SCOPE, message).response()(scope, receive, send)
            return
        with ExitStack() as under_way:
            try:
                state["key_use"] = under_way.enter_context(self._access.request(client))
            except RateLimited as error:
                await Refusal.from_error(error).response()(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> ApiClient | None:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key if scheme.lower() == "bearer" else headers.get("x-api-key")
        return None if given is None else self._access.find(given.strip())
