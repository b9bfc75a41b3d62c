"""The stages of a cascade of drafters: their keys, and how many tokens each is asked for.

It knows no other key of the config.
"""

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
from specserve.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
NGRAM_KINDS = ("unigram", "bigram", "prompt_copy", "max_gram", "random")  # need no model
CASCADE_KINDS = ("vertical", "horizontal", "cascade")
STAGE_KINDS = ("neural", *NGRAM_KINDS)
TABLE_KINDS = ("unigram", "bigram")  # cannot draft without a table
DEFAULT_STAGE_TOKENS = 4
"""Tokens asked of each stage where draft.k is left out."""


def device_name() -> FieldRule:
    def read(value: object, key: str) -> str:
        if isinstance(value, str) and (
            value in ("auto", "cpu", "cuda")
            or (value.startswith("cuda:") and value[5:].isdecimal())
        ):
            return value
        raise ValueError

    return FieldRule("auto, cpu, cuda or cuda:N", read)


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


def check_stages(
    kind: str, stages: Sequence[StageConfig], k: Sequence[Sequence[int]], lenience: Sequence[float]
) -> None:
    """Raise ConfigError if the cascade keys of a draft of this kind contradict one another."""
    if kind in CASCADE_KINDS:
        _check_each(kind, stages)
        _check_token_matrix(kind, len(stages), k)
        _check_lenience(kind, len(stages), lenience)
        return
    for key, given in (("stages", stages), ("k", k), ("lenience", lenience != (1.0,))):
        if given:
            raise ConfigError(
                f"draft.{key} belongs to the kinds {', '.join(CASCADE_KINDS)}, "
                f"and draft.kind is {kind}; leave it out"
            )


def stage_token_matrix(
    kind: str, num_stages: int, k: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return draft.k, or its default for this kind where it is left out.

    k[i][j] is the number of tokens that the target (i = 0) or the stage before stage i asks of
    stage j, as in 2312.11462, Algorithm 1.
    """
    if k:
        return tuple(tuple(row) for row in k)
    rows = 1 if kind == "horizontal" else num_stages
    return tuple(
        tuple(
            DEFAULT_STAGE_TOKENS if j == i or (j > i and kind != "vertical") else 0
            for j in range(num_stages)
        )
        for i in range(rows)
    )


def _check_each(kind: str, stages: Sequence[StageConfig]) -> None:
    if len(stages) < 2:
        raise ConfigError(
            f"draft.kind {kind} needs draft.stages, two or more from the largest to the smallest, "
            f"not {len(stages)}"
        )
    for i, stage in enumerate(stages):
        key = f"draft.stages[{i}]"
        if stage.kind == "neural" and stage.path is None:
            raise ConfigError(f"{key}.path is missing: the kind neural needs a model")
        if stage.kind != "neural" and i < len(stages) - 1:
            raise ConfigError(
                f"{key}.kind {stage.kind} can only be the last stage, for it cannot review; "
                "put it last, or make it neural"
            )
        if stage.kind in TABLE_KINDS and stage.path is None and stage.learn is False:
            raise ConfigError(
                f"{key}.path is missing: the kind {stage.kind} needs a file of tables "
                "(`specserve tables` makes one), or learn true"
            )
        if stage.learn is not None and stage.kind not in NGRAM_KINDS:
            raise ConfigError(
                f"{key}.learn belongs to the kinds {', '.join(NGRAM_KINDS)}, "
                f"and its kind is {stage.kind}; leave it out"
            )


def _check_token_matrix(kind: str, num_stages: int, k: Sequence[Sequence[int]]) -> None:
    if not k:
        return
    rows = 1 if kind == "horizontal" else num_stages
    if len(k) != rows or any(len(row) != num_stages for row in k):
        sizes = " and ".join(f"a row of {len(row)}" for row in k)
        raise ConfigError(
            f"draft.k must be {rows} x {num_stages} for draft.kind {kind} "
            f"with {num_stages} stages, not {sizes}"
        )
    for i, row in enumerate(k):
        if any(row[:i]):
            raise ConfigError(
                f"draft.k[{i}] must begin with {i} zeros, not {list(row)}: "
                "no stage asks a larger one"
            )
        if row[i] == 0:
            raise ConfigError(
                f"draft.k[{i}][{i}] must be above 0: the next smaller stage is asked for "
                "something, or left out of draft.stages"
            )
        if kind == "vertical" and any(row[i + 1 :]):
            raise ConfigError(
                f"draft.k[{i}] must end with zeros for draft.kind vertical, not {list(row)}; "
                "use draft.kind cascade"
            )


def _check_lenience(kind: str, num_stages: int, lenience: Sequence[float]) -> None:
    if kind == "horizontal" and lenience != (1.0,):
        raise ConfigError(
            "draft.lenience belongs to the kinds vertical and cascade: in draft.kind horizontal "
            "nothing is reviewed; leave it out"
        )
    if len(lenience) not in (1, num_stages - 1):
        raise ConfigError(
            f"draft.lenience must be one number, or {num_stages - 1} for {num_stages} stages, "
            f"not {len(lenience)}"
        )
