"""The models at hand: the demo family, its target widened for the clock, and tables counted from what it learnt from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specserve.api.tokenizer import Text
from specserve.config.tree import DEMO, Config, parse
from specserve.demo.corpus import standard_library
from specserve.drafters.ngram.tables import FILE, Bigram, Unigram, count, load, save
from specserve.models.checkpoints.describe import describe
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.model import Placement, open_model
from specserve.progress import Tell, silent
from specserve.tools.inflate import inflate
from specserve.tools.plan.measure import Reader, Tabled

SUPPORT, PAGES = 64, 512
SMALL, DRAFT = "small", "draft"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is measured."""

    params: int
    text_tokens: int
    prompts: int
    max_tokens: int
    turns: int
    threads: int


@dataclass(frozen=True, slots=True)
class Family:
    """Directories."""

    target: Path  # widened
    params: int  # that it has then
    tables: Path

    @staticmethod
    @contextmanager
    def widened(params: int, tell: Tell = silent) -> Iterator[Family]:
        """For as long as it is needed."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            reached = inflate(DEMO / "target", params, directory / "target", tell)
            tell("counting tables")
            speaks = Text.load(DEMO / "target")
            texts = (speaks.encode(text, special=False) for text in standard_library().train)
            save(count(texts, keep=SUPPORT, fingerprint=speaks.fingerprint), directory / FILE)
            yield Family(directory / "target", reached, directory / FILE)

    def config(self, **overrides: object) -> Config:
        """Of an engine over the widened target; keys with `__` for dots."""
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        return parse(
            {"target.path": str(self.target), "cache.pages": PAGES, "speculation.gamma": 0, **keys}
        )

    def tabled(self) -> dict[str, Tabled]:
        counts = load(self.tables)
        return {
            "unigram": Tabled(Unigram(counts, width=SUPPORT)),
            "bigram": Tabled(Bigram(counts, width=SUPPORT)),
        }


def reader(directory: Path) -> Reader:
    config = parse({"target.path": str(directory), "cache.pages": PAGES})
    return Reader(
        open_model(find_checkpoint(directory), Placement.of(config.target, config)), support=SUPPORT
    )


def readers(*names: str) -> dict[str, Reader]:
    """Members of the family, by their directories."""
    return {name: reader(DEMO / name) for name in names}


def num_parameters(directory: Path) -> int:
    return describe(directory).num_parameters


def label(name: str) -> str:
    """With its size."""
    return f"{name} ({num_parameters(DEMO / name) / 1e6:.1f}M)"
