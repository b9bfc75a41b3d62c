"""What each kind of drafter is worth, measured and written into one page. `python -m benchmarks.drafters --out docs/drafters.md`"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.drafters import options, page, report
from benchmarks.drafters.copy_model import Copyist, Course
from benchmarks.drafters.options import Budget
from benchmarks.drafters.rewriting import Rewriting
from specserve.tools.reproduce.family import Family
from specserve.tools.reproduce.page import Section


class Workshop:
    """Opens what the sections need when the first of them asks for it."""

    def __init__(self, budget: Budget, stack: ExitStack, *, cache: Path | None) -> None:
        self.budget, self._stack, self._cache = budget, stack, cache

    @cached_property
    def family(self) -> Family:
        return self._stack.enter_context(Family.widened(self.budget.params))

    @cached_property
    def copyist(self) -> Copyist:
        cache = self.directory() if self._cache is None else self._cache
        return Copyist.found(cache, Rewriting.of_library(), Course(self.budget.minutes))

    def directory(self) -> Path:
        """A new one, which ends with the command."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory()))


SECTIONS: Mapping[str, Callable[[Workshop], Sequence[Section]]] = {
    "alpha": lambda shop: report.alphas(shop.family, shop.budget),
    "copy": lambda shop: (report.copy(shop.copyist, shop.directory() / "widened", shop.budget),),
    "speed": lambda shop: (report.proposals(shop.directory(), shop.budget),),
    "heads": lambda shop: (report.heads(shop.family, shop.budget),),
}


def run(names: Sequence[str], budget: Budget, *, out: Path | None, cache: Path | None) -> None:
    with ExitStack() as stack:
        shop = Workshop(budget, stack, cache=cache)
        for name in names:
            torch.set_num_threads(budget.threads)  # engines have set their own
            sections = SECTIONS[name](shop)
            print("\n\n".join(section.markdown() for section in sections), end="\n\n", flush=True)
            if out is not None:
                page.write(out, sections, report.TITLES)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options.parser(__doc__).parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("specserve.tools.bench").setLevel(logging.INFO)
    run(
        [name for name in SECTIONS if name in asked.only],
        options.budget(asked),
        out=asked.out,
        cache=asked.cache,
    )


if __name__ == "__main__":
    main()
