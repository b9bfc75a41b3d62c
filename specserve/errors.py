"""The exceptions of specserve.

Each class is one kind of error; its message is one sentence for the user.
"""

from __future__ import annotations


class SpecserveError(Exception):
    """Base class of all errors that are meant for users."""

    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(SpecserveError):
    """A key or a value of the configuration that cannot be used."""


class BadRequest(SpecserveError):
    """A request that can never succeed as it stands."""


class BadValue(BadRequest):
    """A parameter outside its range, named by `param`."""


class EmptyPrompt(BadRequest):
    """A prompt without a single token."""


class UnknownToken(BadRequest):
    """A token id that the vocabulary does not have."""


class TooLong(BadRequest):
    """A prompt that leaves no room for a single new token."""


class NotServed(BadRequest):
    """A model name that is not served here."""


class Overloaded(SpecserveError):
    """A full queue; the same request may succeed later."""


class RateLimited(SpecserveError):
    """A client that has used up its requests or its tokens a minute, as `limit` says."""

    def __init__(
        self, message: str, *, limit: str = "requests", retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message)
        self.limit, self.retry_after_s = limit, retry_after_s


class KeyRevoked(SpecserveError):
    """An API key that has been removed, or has expired, while its request was under way."""


class Unavailable(SpecserveError):
    """A server that is starting or stopping; the same request may succeed later."""


class Displaced(Unavailable):
    """An engine that goes away; another one can resume its requests."""


class UnsuitableEngine(Unavailable):
    """An engine that cannot take a request which another one may."""


class TimedOut(SpecserveError):
    """A request that took longer than `limits.request_timeout_s`."""


class NotBegun(TimedOut):
    """A request that got no token in its time, which is the server's fault."""


class ModelError(SpecserveError):
    """A checkpoint that cannot be served."""


class ModelNotFound(ModelError):
    """A model that is neither a local checkpoint nor a hub name that can be reached."""


class UnsupportedModel(ModelError):
    """An architecture, or a combination of options with it, that is not supported."""


class NoShardingPlan(UnsupportedModel):
    """An architecture that cannot be split over the requested number of ranks."""


class AdapterError(ModelError):
    """An adapter that cannot be read, or that is not one of the target."""


class TokenizerMismatch(ModelError):
    """A draft whose tokens are not the target's."""


class OutOfPages(SpecserveError):
    """A cache without room for a request; nothing was changed."""


class TooLittleMemory(SpecserveError):
    """A memory budget that does not hold a single sequence."""


class WorkerLost(SpecserveError):
    """A worker that died or stopped answering."""


class DeviceFault(SpecserveError):
    """A device that computes or stores wrongly, found by the self-test of a worker."""

    def __init__(self, message: str, *, node: str = "", device: str = "") -> None:
        super().__init__(message)
        self.node, self.device = node, device  # Ray's id of the node; its name there


class TargetReplaced(WorkerLost):
    """A target that was replaced between two rounds; the round did not run."""


class BadAnswer(SpecserveError):
    """An answer of a worker that does not fit the request."""


class BadFrame(SpecserveError):
    """A message in an unknown format or of another version."""


class VersionMismatch(BadFrame):
    """A process at the other end of a link that runs another release of specserve."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error of a library, which may have many.

    The next line is added where the first one only introduces it.
    """
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first
