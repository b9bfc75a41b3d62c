"""Demo family: its target widened for timing, its drafts, and tables of its training text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO, Config, config_from_keys
from specserve.demo.corpus import standard_library
from specserve.drafters.ngram.tables import (
    TABLES_FILE,
    BigramTable,
    UnigramTable,
    count_texts,
    load_tables,
    save_tables,
)
from specserve.models.checkpoints.find import describe, find_checkpoint
from specserve.models.checkpoints.widen import inflate
from specserve.models.model import ModelOptions, open_model
from specserve.progress import ReportProgress, no_progress
from specserve.tools.plan.measure import ModelReader, TableDrafter

SUPPORT, PAGES = 64, 512
SMALL, DRAFT = "small", "draft"


@dataclass(frozen=True, slots=True)
class ReproduceBudget:
    """Amount of what is measured."""

    params: int
    text_tokens: int
    prompts: int
    max_tokens: int
    turns: int
    threads: int


@dataclass(frozen=True, slots=True)
class DemoFamily:
    """Widened target with its number of parameters, and the counted tables."""

    target: Path
    params: int
    tables: Path

    @staticmethod
    @contextmanager
    def widened(
        params: int,
        report_progress: ReportProgress = no_progress,
        *,
        num_files: int | None = None,
    ) -> Iterator[DemoFamily]:
        """Yield a family in a temporary directory, of tables counted from `num_files` files."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            reached = inflate(DEMO / "target", params, directory / "target", report_progress)
            report_progress("counting tables")
            tokenizer = Tokenizer.load(DEMO / "target")
            files = standard_library().train[:num_files]
            texts = (tokenizer.encode(text, special=False) for text in files)
            save_tables(
                count_texts(texts, keep=SUPPORT, fingerprint=tokenizer.fingerprint),
                directory / TABLES_FILE,
            )
            yield DemoFamily(directory / "target", reached, directory / TABLES_FILE)

    def config(self, **overrides: object) -> Config:
        """Return the config of an engine over the widened target; keys have `__` for dots."""
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        return config_from_keys(
            {"target.path": str(self.target), "cache.pages": PAGES, "speculation.gamma": 0, **keys}
        )

    def table_drafters(self) -> dict[str, TableDrafter]:
        counts = load_tables(self.tables)
        return {
            "unigram": TableDrafter(UnigramTable(counts, width=SUPPORT)),
            "bigram": TableDrafter(BigramTable(counts, width=SUPPORT)),
        }


def reader(directory: Path) -> ModelReader:
    config = config_from_keys({"target.path": str(directory), "cache.pages": PAGES})
    return ModelReader(
        open_model(find_checkpoint(directory), ModelOptions.from_config(config.target, config)),
        support=SUPPORT,
    )


def readers(*names: str) -> dict[str, ModelReader]:
    """Return members of the family, by their directories."""
    return {name: reader(DEMO / name) for name in names}


def num_parameters(directory: Path) -> int:
    return describe(directory).num_parameters


def label(name: str) -> str:
    """Return the name with the number of parameters."""
    return f"{name} ({num_parameters(DEMO / name) / 1e6:.1f}M)"
