"""Version of the protocol between processes, and the refusal of any other one."""

from __future__ import annotations

from specserve import __version__
from specserve.errors import VersionMismatch

VERSION = 11
RELEASE = __version__


def require_same_version(version: object, release: object = None) -> None:
    """Raise VersionMismatch unless the other end speaks this version of the protocol.

    `release` is the version of its package, if that is known.
    """
    if type(version) is int and version == VERSION:
        return
    theirs = f"protocol version {version}" if type(version) is int else "no known protocol version"
    if isinstance(release, str):
        theirs += f" (specserve {release})"
    raise VersionMismatch(
        f"the other end of a link speaks {theirs}, and this one version {VERSION} "
        f"(specserve {RELEASE}); run the same release everywhere"
    )
