"""Where a server under load is, and how it is asked. Knows URLs and headers; neither what is asked nor when."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from specserve.errors import BadValue
from specserve.tools.bench.streams import Stream, fetch, stream


@dataclass(frozen=True, slots=True)
class Address:
    """A server, behind a path if a proxy puts it there."""

    host: str
    port: int
    prefix: str = ""  # of every path; "" or "/..." without a slash at its end
    tls: ssl.SSLContext | None = None
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Address:
        where = urlsplit(url)
        try:
            port = where.port
        except ValueError as error:
            raise BadValue(f"--url {url}: {error}", param="url") from error
        if (
            where.scheme not in ("http", "https")
            or not where.hostname
            or where.query
            or where.fragment
            or where.username is not None
        ):
            raise BadValue(
                f"--url is written http://host:port or https://host/path, not {url!r}", param="url"
            )
        secure = where.scheme == "https"
        return cls(
            where.hostname,
            port or (443 if secure else 80),
            where.path.rstrip("/"),
            ssl.create_default_context() if secure else None,
            key,
        )

    def __str__(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.host}:{self.port}{self.prefix}"

    async def get(self, path: str) -> Stream:
        return await fetch(
            self.host, self.port, self.prefix + path, headers=self._headers(), tls=self.tls
        )

    async def post(self, path: str, body: Mapping[str, object], *, into: Stream) -> Stream:
        """Each event says what its tokens were: that is how they are counted."""
        headers = {"X-Specserve-Origins": "1", **self._headers()}
        return await stream(
            self.host, self.port, self.prefix + path, body, headers=headers, tls=self.tls, into=into
        )

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
