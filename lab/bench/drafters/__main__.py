"""Measure each kind of drafter and write the results into one page.

`python -m lab.bench.drafters --out docs/measurements/drafters.md`
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch

from lab.bench.drafters import options, report
from lab.bench.drafters.copy_model import CopyModel, TrainingBudget
from lab.bench.drafters.eagle_rounds import NUM_FILES, TrainedHeads
from lab.bench.drafters.options import Budget
from lab.bench.drafters.rewriting import RewritingCorpus
from lab.papers.family import DemoFamily
from lab.papers.page import Section


class SectionInputs:
    """Models that the sections measure, each opened when the first section needs it."""

    def __init__(self, budget: Budget, stack: ExitStack, *, cache: Path | None) -> None:
        self.budget, self._stack, self._cache = budget, stack, cache

    @cached_property
    def family(self) -> DemoFamily:
        return self._stack.enter_context(
            DemoFamily.widened(self.budget.params, num_files=self.budget.files)
        )

    @cached_property
    def copy_model(self) -> CopyModel:
        cache = self.new_directory() if self._cache is None else self._cache
        corpus = RewritingCorpus.from_standard_library()
        return CopyModel.load_or_train(cache, corpus, TrainingBudget(self.budget.minutes))

    @cached_property
    def heads(self) -> TrainedHeads:
        cache = self.new_directory() if self._cache is None else self._cache / "eagle"
        return TrainedHeads(cache, self.budget.minutes, self.budget.files or NUM_FILES)

    def new_directory(self) -> Path:
        """Create a directory that is deleted when the command ends."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory()))


SECTIONS: Mapping[str, Callable[[SectionInputs], Sequence[Section]]] = {
    "alpha": lambda inputs: report.measure_alphas(inputs.family, inputs.heads, inputs.budget),
    "copy": lambda inputs: (
        report.measure_copying(
            inputs.copy_model, inputs.new_directory() / "widened", inputs.budget
        ),
    ),
    "speed": lambda inputs: (report.measure_proposals(inputs.new_directory(), inputs.budget),),
    "heads": lambda inputs: (report.measure_heads(inputs.family, inputs.budget),),
    "eagle": lambda inputs: (report.measure_eagle(inputs.heads, inputs.budget),),
}


def run(names: Sequence[str], budget: Budget, *, out: Path | None, cache: Path | None) -> None:
    with ExitStack() as stack:
        inputs = SectionInputs(budget, stack, cache=cache)
        for name in names:
            torch.set_num_threads(budget.threads)  # engines of the section before set their own
            sections = SECTIONS[name](inputs)
            print("\n\n".join(section.markdown() for section in sections), end="\n\n", flush=True)
            if out is not None:
                report.write_page(out, sections, report.TITLES)


def main(arguments: Sequence[str] | None = None) -> None:
    args = options.parser(__doc__).parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lab").setLevel(logging.INFO)
    run(
        [name for name in SECTIONS if name in args.only],
        options.budget(args),
        out=args.out,
        cache=args.cache,
    )


if __name__ == "__main__":
    main()
