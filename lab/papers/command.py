"""Write the requested sections as one page with pictures: `python -m lab.papers`.

Neither parses the command line nor prints.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import date
from functools import cached_property

import torch

from lab.papers.acceptances import acceptances
from lab.papers.cascades import cascades
from lab.papers.family import DemoFamily, ReproduceBudget
from lab.papers.formulas import figures, table_1
from lab.papers.page import Section
from lab.papers.speed import MeasuredSetup, speed
from specserve.errors import BadValue
from specserve.progress import ReportProgress, no_progress
from specserve.tools.plan.curves import check_drawable

TITLE = "# The papers' tables and figures, ours beside theirs"
ABOUT = """`python -m lab.papers --out docs/measurements` writes this page. The formulas are
those of `specserve/theory.py`, from [2211.17192](https://arxiv.org/abs/2211.17192) and
[2312.11462](https://arxiv.org/abs/2312.11462). What takes models is measured with the demo
family: a target of 6.6M parameters and two drafts distilled from it, on Python's standard
library. These are other models, another task and another machine than the papers': what is to be
compared is the shape."""


class ReproduceContext:
    """Models and measurements that sections share, opened on first use."""

    def __init__(
        self, budget: ReproduceBudget, stack: ExitStack, report_progress: ReportProgress
    ) -> None:
        self.budget, self._stack, self.report_progress = budget, stack, report_progress

    @cached_property
    def family(self) -> DemoFamily:
        return self._stack.enter_context(
            DemoFamily.widened(self.budget.params, self.report_progress)
        )

    @cached_property
    def bench(self) -> MeasuredSetup:
        return MeasuredSetup.open(self.family, self.budget, self.report_progress)


SECTIONS: Mapping[str, Callable[[ReproduceContext], Section]] = {
    "table-1": lambda _: table_1(),
    "figures": lambda _: figures(),
    "alphas": lambda context: acceptances(context.family, context.budget, context.report_progress),
    "speed": lambda context: speed(context.bench),
    "cascades": lambda context: cascades(context.bench),
}


def reproduce(options: argparse.Namespace, report_progress: ReportProgress = no_progress) -> str:
    """Return the page, and write it with its pictures if a directory is given."""
    budget = ReproduceBudget(
        options.params,
        options.text_tokens,
        options.prompts,
        options.max_tokens,
        options.turns,
        options.threads,
    )
    if budget.max_tokens < 2:
        raise BadValue(
            f"--max-tokens must be 2 or more, not {budget.max_tokens}: the first token comes with "
            "the prompt",
            param="max_tokens",
        )
    names = [name for name in SECTIONS if name in (options.tables or SECTIONS)]
    if options.out is not None:
        if not options.out.is_dir():
            raise BadValue(f"--out {options.out} is no directory; make it first", param="out")
        check_drawable(options.out / "any.png")
    torch.set_num_threads(budget.threads)
    sections = []
    with ExitStack() as stack:
        context = ReproduceContext(budget, stack, report_progress)
        for name in names:
            report_progress(name)
            sections.append(SECTIONS[name](context))
    page = (
        "\n\n".join(
            (TITLE, ABOUT, _conditions(budget), *(section.markdown() for section in sections))
        )
        + "\n"
    )
    if options.out is not None:
        (options.out / "reproduction.md").write_text(page, encoding="utf-8")
        for section in sections:
            section.draw(options.out)
    return page


def _conditions(budget: ReproduceBudget) -> str:
    return (
        f"{date.today()}, {platform.machine()}, {budget.threads} threads, torch "
        f"{torch.__version__}; {budget.prompts} prompts, {budget.max_tokens} tokens each, "
        f"{budget.turns} turns."
    )
