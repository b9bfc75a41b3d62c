"""Everything that specserve refuses, and why. Each class is one kind of refusal; its message is one sentence for the person who asked."""

from __future__ import annotations


class SpecserveError(Exception):
    """Root of all errors that are meant to be read by users."""

    param: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(SpecserveError):
    """A key or a value of the configuration that cannot be used."""


class BadRequest(SpecserveError):
    """A request that can never succeed as it stands."""


class BadValue(BadRequest):
    """A parameter outside its range; `param` names it."""


class EmptyPrompt(BadRequest):
    """A prompt without a single token."""


class UnknownToken(BadRequest):
    """A token id that the vocabulary does not have."""


class TooLong(BadRequest):
    """A prompt that leaves no room for a single new token."""


class NotServed(BadRequest):
    """A model by a name that is not served here."""


class Overloaded(SpecserveError):
    """The queue is full; the same request may succeed later."""


class RateLimited(SpecserveError):
    """A client that has used up its requests or tokens a minute; `limit` says which."""

    def __init__(
        self, message: str, *, limit: str = "requests", retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message)
        self.limit, self.retry_after_s = limit, retry_after_s


class Unavailable(SpecserveError):
    """Starting or stopping; the same request may succeed later."""


class Displaced(Unavailable):
    """An engine that goes away; another one can go on where this one was."""


class TimedOut(SpecserveError):
    """A request that took longer than `limits.request_timeout_s`."""


class ModelError(SpecserveError):
    """A checkpoint that cannot be served."""


class ModelNotFound(ModelError):
    """Neither a local checkpoint nor a hub name that can be reached."""


class UnsupportedModel(ModelError):
    """An architecture, or a combination of options with it, that is not supported."""


class NoShardingPlan(UnsupportedModel):
    """An architecture that cannot be split over the asked number of ranks."""


class TokenizerMismatch(ModelError):
    """A draft that does not speak the target's tokens."""


class OutOfPages(SpecserveError):
    """The cache has no room; nothing was changed."""


class TooLittleMemory(SpecserveError):
    """The memory budget does not hold a single sequence."""


class WorkerLost(SpecserveError):
    """A worker died or stopped answering."""


class BadFrame(SpecserveError):
    """A message that is not ours, or of another version."""


def first_line(error: BaseException) -> str:
    """Of others' errors, which may tell their whole story."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
