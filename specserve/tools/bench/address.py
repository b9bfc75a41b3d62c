"""The URL of a server under load, and requests to it. Knows headers; no bodies and no schedule."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from specserve.errors import BadValue
from specserve.tools.bench.streams import Stream, fetch, stream


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Host and port of a server, with a path prefix where a proxy needs one."""

    host: str
    port: int
    prefix: str = ""  # put before every path; "" or "/..." without a slash at its end
    tls: ssl.SSLContext | None = None
    key: str | None = field(default=None, repr=False)

    @classmethod
    def from_url(cls, url: str, key: str | None = None) -> ServerAddress:
        """Parse the value of --url. Raises BadValue."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise BadValue(f"--url {url}: {error}", param="url") from error
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username is not None
        ):
            raise BadValue(
                f"--url is written http://host:port or https://host/path, not {url!r}", param="url"
            )
        secure = parts.scheme == "https"
        return cls(
            parts.hostname,
            port or (443 if secure else 80),
            parts.path.rstrip("/"),
            ssl.create_default_context() if secure else None,
            key,
        )

    def __str__(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.host}:{self.port}{self.prefix}"

    async def get(self, path: str) -> Stream:
        """Send a GET request and return the whole answer."""
        return await fetch(
            self.host, self.port, self.prefix + path, headers=self._headers(), tls=self.tls
        )

    async def post(self, path: str, body: Mapping[str, object], *, into: Stream) -> Stream:
        """Send a streaming request, asking for the origins of tokens, by which they are counted."""
        headers = {"X-Specserve-Origins": "1", **self._headers()}
        return await stream(
            self.host, self.port, self.prefix + path, body, headers=headers, tls=self.tls, into=into
        )

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
