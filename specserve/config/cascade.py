"""The keys of a cascade's stages. Knows no other section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.config.fields import (
    FieldRule,
    boolean,
    choice,
    integer,
    list_of,
    number,
    setting,
    text,
)
from specserve.config.kinds import CASCADE_KINDS, DTYPES, NGRAM_KINDS, device_name
from specserve.errors import ConfigError

STAGE_KINDS = ("neural", *NGRAM_KINDS)


def stage_kind() -> FieldRule:
    plain = choice(*STAGE_KINDS)

    def read(value: object, key: str) -> str:
        if value in CASCADE_KINDS:
            raise ConfigError(
                f"{key} {value} would be a cascade in a cascade; "
                "name its stages in draft.stages themselves"
            )
        found: str = plain.read(value, key)
        return found

    return FieldRule(plain.expects, read)


def leniences() -> FieldRule:
    """Accept one number for all reviews, or a list with one for each."""
    one = number(1, 1000)

    def read(value: object, key: str) -> tuple[float, ...]:
        if isinstance(value, Sequence) and not isinstance(value, str):
            found: tuple[float, ...] = list_of(one).read(value, key)
            return found
        return (one.read(value, key),)

    return FieldRule(f"{one.expects}, or a list of such numbers", read)


def token_matrix() -> FieldRule:
    return list_of(list_of(integer(0, 64)))


@dataclass(frozen=True, slots=True)
class StageConfig:
    """One drafter of a cascade. What it leaves out is taken from the draft section."""

    kind: str = setting("neural", stage_kind())
    path: str | None = setting(None, text())
    revision: str | None = setting(None, text())  # of a hub name
    dtype: str | None = setting(None, choice(*DTYPES))
    device: str | None = setting(None, device_name())
    support: int | None = setting(None, integer(1, 4096))
    learn: bool | None = setting(None, boolean())
