"""Cascades of tiny drafters for the target of the other proofs, opened from a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specserve.config.tree import config_from_keys
from specserve.drafters.ngram.tables import TABLES_FILE, count_texts, save_tables
from specserve.drafters.registry import open_drafter
from tests.support import checkpoints
from tests.support.continuations import NOISE, PAGES, VOCAB, Group, Pairs
from tests.support.engines import PAGE_SIZE, AnticipatingDrafter, Engine
from tests.support.exact_distribution import Conditionals, on_support

ROUGH_NOISE = 2.5
"""Noise of the smaller model, in units of the draft's: it agrees less."""
SUPPORT = 5
"""Support of the largest stage; the smaller model draws from fewer ids, and bigrams from all."""


@dataclass(frozen=True, slots=True)
class CascadeCase:
    """A cascade by the names of its stages."""

    kind: str
    stages: tuple[str, ...]
    k: tuple[tuple[int, ...], ...] = ()
    lenience: float | tuple[float, ...] = 1.0
    pages: int = 3 * PAGES
    """Pages of each stage; where a larger one lacked room, a smaller one would take over."""
    ahead: bool = False
    """True for a cascade that anticipates."""


CASCADES: Mapping[str, CascadeCase] = {
    "vertical": CascadeCase("vertical", ("draft", "rough"), pages=PAGES * 3 // 4),
    "vertical, l = 2": CascadeCase("vertical", ("draft", "rough"), lenience=2.0),
    "vertical on bigrams, l = 8": CascadeCase("vertical", ("draft", "bigram"), lenience=8.0),
    "vertical on copies": CascadeCase("vertical", ("draft", "prompt_copy"), k=((1, 0), (0, 2))),
    "horizontal": CascadeCase("horizontal", ("draft", "rough", "bigram"), k=((1, 1, 1),)),
    "cascade": CascadeCase(
        "cascade", ("draft", "rough", "bigram"), k=((2, 1, 1), (0, 2, 1), (0, 0, 2))
    ),
    "cascade, l = 2 and 1.5": CascadeCase(
        "cascade",
        ("draft", "rough", "bigram"),
        k=((3, 1, 1), (0, 2, 1), (0, 0, 2)),
        lenience=(2.0, 1.5),
    ),
    "cascade ahead": CascadeCase(
        "cascade",
        ("draft", "rough", "max_gram"),
        k=((2, 1, 1), (0, 2, 1), (0, 0, 2)),
        lenience=1.5,
        ahead=True,
    ),
}


class CascadeEngine(Engine):
    """An engine whose drafter is a cascade, each stage with pages of its own."""

    def __init__(
        self, target: Path, kind: CascadeCase, stages: Mapping[str, Mapping[str, object]]
    ) -> None:
        from specserve.features.cascade.drafter import CascadeDrafter

        super().__init__(target, pages=PAGES)
        keys: dict[str, object] = {
            "draft.kind": kind.kind,
            "draft.stages": [stages[name] for name in kind.stages],
            "draft.lenience": kind.lenience,
        }
        keys |= {"draft.k": kind.k} if kind.k else {}
        own = {
            "draft.dtype": "float32",
            "draft.device": "cpu",
            "cache.pages": kind.pages,
            "cache.page_size": PAGE_SIZE,
            "target.path": str(target),
        }
        opened = open_drafter(config_from_keys({}, own | keys), target_vocab_size=VOCAB)
        assert isinstance(opened.drafter, CascadeDrafter)
        self.cascade, self.runners = opened.drafter, opened._runners
        self.drafter = opened  # type: ignore[assignment]
        self.ahead = AnticipatingDrafter(self.cascade, None) if kind.ahead else None

    def check_idle(self) -> None:
        if self.ahead is not None:
            self.ahead.anticipation.prepare(lambda: True)
        for runner in (self.target.runner, *self.runners):
            runner.cache.check()
            assert runner.cache.num_used == 0
        assert not self.cascade._sequences


class Cascades(Pairs):
    """The pairs of the other proofs, and cascades.

    Their q is known where no lenience changes it: it is that of the largest stage.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        checkpoints.perturb(directory / "draft", directory / "rough", NOISE * ROUGH_NOISE, seed=2)
        save_tables(count_texts([_chain()], keep=VOCAB), directory / TABLES_FILE)
        stages: dict[str, dict[str, object]] = {
            "draft": {"path": str(directory / "draft"), "support": SUPPORT},
            "rough": {"path": str(directory / "rough"), "support": 3},
            "bigram": {"kind": "bigram", "path": str(directory)},
            "max_gram": {"kind": "max_gram"},
            "prompt_copy": {"kind": "prompt_copy"},
        }
        self.engines |= {
            name: CascadeEngine(directory / "target", kind, stages)
            for name, kind in CASCADES.items()
        }

    def full_support_drafter(self, drafter: str) -> str:
        return "full" if drafter in CASCADES else super().full_support_drafter(drafter)

    def _q(self, group: Group, drafter: str) -> Conditionals:
        if drafter in CASCADES:
            return on_support(super()._q(group, "full"), SUPPORT, VOCAB)
        return super()._q(group, drafter)


def _chain() -> list[int]:
    """Return a text in which one or two tokens follow each token mostly.

    The target's texts differ, so a stage that reviews rejects much.
    """
    rng = np.random.default_rng(5)
    rows = rng.dirichlet(np.full(VOCAB, 0.3), VOCAB)
    text = [0]
    for _ in range(4000):
        text.append(int(rng.choice(VOCAB, p=rows[text[-1]])))
    return text
