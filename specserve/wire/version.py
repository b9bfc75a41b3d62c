"""Version of the protocol between processes, and the refusal of any other one."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.errors import VersionMismatch
from specserve.version import __version__

VERSION = 17
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Versioned:
    """A message in a call by Ray, which pickles it, with the version that its sender speaks.

    These are its first fields, so that other versions can read them whatever the others are.
    """

    version: int = VERSION
    release: str = RELEASE

    def require_same_version(self) -> None:
        """Raise VersionMismatch if the sender runs another release: nothing else may be read."""
        require_same_version(self.version, self.release)
