"""`specserve reproduce`: the sections that were asked for, as one page with its pictures. Builds; neither parses nor prints."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import date
from functools import cached_property

import torch

from specserve.errors import BadValue
from specserve.progress import Tell, silent
from specserve.tools.plan.curves import check_drawable
from specserve.tools.reproduce.acceptances import acceptances
from specserve.tools.reproduce.cascades import cascades
from specserve.tools.reproduce.family import Budget, Family
from specserve.tools.reproduce.formulas import figures, table_1
from specserve.tools.reproduce.page import Section
from specserve.tools.reproduce.speed import Bench, speed

TITLE = "# The papers' tables and figures, ours beside theirs"
ABOUT = """`specserve reproduce --out docs` writes this page. The formulas are those of `specserve/theory.py`, from
[2211.17192](https://arxiv.org/abs/2211.17192) and [2312.11462](https://arxiv.org/abs/2312.11462). What takes models is measured with the demo
family: a target of 6.6M parameters and two drafts distilled from it, on Python's standard library. These are other models, another task and another
machine than the papers': what is to be compared is the shape."""


class Workshop:
    """Opens what the sections need when the first of them asks for it."""

    def __init__(self, budget: Budget, stack: ExitStack, tell: Tell) -> None:
        self.budget, self._stack, self.tell = budget, stack, tell

    @cached_property
    def family(self) -> Family:
        return self._stack.enter_context(Family.widened(self.budget.params, self.tell))

    @cached_property
    def bench(self) -> Bench:
        return Bench.open(self.family, self.budget, self.tell)


SECTIONS: Mapping[str, Callable[[Workshop], Section]] = {
    "table-1": lambda _: table_1(),
    "figures": lambda _: figures(),
    "alphas": lambda shop: acceptances(shop.family, shop.budget, shop.tell),
    "speed": lambda shop: speed(shop.bench),
    "cascades": lambda shop: cascades(shop.bench),
}


def reproduce(options: argparse.Namespace, tell: Tell = silent) -> str:
    """The page; `tell` hears what is under way."""
    budget = Budget(
        options.params,
        options.text_tokens,
        options.prompts,
        options.max_tokens,
        options.turns,
        options.threads,
    )
    if budget.max_tokens < 2:
        raise BadValue(
            f"--max-tokens must be 2 or more, not {budget.max_tokens}: the first token comes with the prompt",
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
        shop = Workshop(budget, stack, tell)
        for name in names:
            tell(name)
            sections.append(SECTIONS[name](shop))
    page = (
        "\n\n".join(
            (TITLE, ABOUT, _circumstances(budget), *(section.markdown() for section in sections))
        )
        + "\n"
    )
    if options.out is not None:
        (options.out / "reproduction.md").write_text(page, encoding="utf-8")
        for section in sections:
            section.draw(options.out)
    return page


def _circumstances(budget: Budget) -> str:
    return (
        f"{date.today()}, {platform.machine()}, {budget.threads} threads, torch {torch.__version__}; "
        f"{budget.prompts} prompts, {budget.max_tokens} tokens each, {budget.turns} turns."
    )
