"""Serve the playground and the API's reference: two pages and their parts, read once.

Knows files and their types only.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.responses import Response

HOME, REFERENCE, PARTS = "/", "/docs", "/playground/"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Nothing is loaded from elsewhere, and no script runs but the page's own. A text that a model wrote
# can then do nothing.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # page and parts belong to one version
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """The pages at `GET /` and `GET /docs`, and what they load."""

    def __init__(self) -> None:
        found = files("specserve.api.playground").iterdir()
        self._files = {
            file.name: file.read_bytes() for file in found if _ending(file.name) in TYPES
        }

    @property
    def paths(self) -> frozenset[str]:
        """Paths that a browser requests before it can send a key."""
        return frozenset((HOME, REFERENCE, *(PARTS + name for name in self._files)))

    async def home(self) -> Response:
        return self._answer("index.html")

    async def reference(self) -> Response:
        return self._answer("reference.html")

    async def part(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        return Response(self._files[name], media_type=TYPES[_ending(name)], headers=HEADERS)


def _ending(name: str) -> str:
    return name[name.rfind(".") :]
