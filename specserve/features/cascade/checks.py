"""Checks of the keys of a cascade of drafters."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.config.cascade import StageConfig
from specserve.config.kinds import CASCADE_KINDS, NGRAM_KINDS
from specserve.config.tree import Config
from specserve.errors import ConfigError

TABLE_KINDS = ("unigram", "bigram")  # cannot draft without a table


def check_config(config: Config) -> None:
    """Raise ConfigError if the cascade keys of a draft of this kind contradict one another."""
    draft, kind = config.draft, config.draft.kind
    if kind in CASCADE_KINDS:
        _check_each(kind, draft.stages)
        _check_token_matrix(kind, len(draft.stages), draft.k)
        _check_lenience(kind, len(draft.stages), draft.lenience)
        if draft.path is not None:
            raise ConfigError(
                f"draft.path is of no use to draft.kind {kind}, whose stages have their own; "
                "leave it out"
            )
        return
    given_keys = {
        "stages": draft.stages,
        "k": draft.k,
        "lenience": draft.lenience != (1.0,),
    }
    for key, given in given_keys.items():
        if given:
            raise ConfigError(
                f"draft.{key} belongs to the kinds {', '.join(CASCADE_KINDS)}, "
                f"and draft.kind is {kind}; leave it out"
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
