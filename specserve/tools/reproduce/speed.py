"""Table 2 of 2211.17192 with the demo family: the measured walltime factor of each draft beside what Theorem 3.8 expects of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts, held_out_tokens
from specserve.inprocess import Parts, open_parts
from specserve.progress import Tell
from specserve.theory import best_gamma, tokens_per_round, walltime_factor
from specserve.tools.plan.measure import TEMPERATURES, Overlap, seconds
from specserve.tools.reproduce.acceptances import measured
from specserve.tools.reproduce.contest import Prompts, Result, Way, hold
from specserve.tools.reproduce.family import (
    DRAFT,
    SMALL,
    Budget,
    Family,
    label,
    num_parameters,
    reader,
    readers,
)
from specserve.tools.reproduce.page import Section, table
from specserve.tools.reproduce.published import TABLE_2

PROMPT, MAX_GAMMA = 64, 10  # tokens of a prompt
ROWS = tuple(range(1, MAX_GAMMA + 2))


@dataclass(frozen=True, slots=True)
class Costs:
    """Of passes, over that of the target with one row."""

    drafts: Mapping[str, float]
    target: Mapping[
        int, float
    ]  # by rows: what verifying takes more than plain decoding, of which the theorem knows nothing

    @classmethod
    def of(cls, family: Family, tell: Tell) -> Costs:
        """Timed in turns, on the widened target."""
        target = reader(family.target)
        passes = {f"{rows} rows": target.pass_seconds(rows) for rows in ROWS}
        taken = seconds(
            passes | {name: own.pass_seconds(1) for name, own in readers(SMALL, DRAFT).items()},
            tell=tell,
        )
        one = taken["1 rows"]
        return cls(
            {name: taken[name] / one for name in (SMALL, DRAFT)},
            {rows: taken[f"{rows} rows"] / one for rows in ROWS},
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """What the measured tables start from."""

    family: Family
    budget: Budget
    costs: Costs
    alphas: Mapping[str, Overlap]
    parts: Parts  # of the engine that decodes plainly; the others share its target
    prompts: Prompts
    text: Sequence[int]  # that acceptances are measured on
    tell: Tell

    @classmethod
    def open(cls, family: Family, budget: Budget, tell: Tell) -> Bench:
        costs, alphas, text = (
            Costs.of(family, tell),
            measured(family, budget, tell),
            held_out_tokens(budget.text_tokens),
        )
        prompts = held_out_prompts(count=budget.prompts, length=PROMPT)
        return cls(
            family,
            budget,
            costs,
            alphas,
            open_parts(family.config(draft__kind="none")),
            prompts,
            text,
            tell,
        )

    def plain(self) -> Way:
        return Way("autoregressive", self.family.config(draft__kind="none"), 0)

    def neural(self, name: str, temperature: float) -> Way:
        """With the gamma that is best by the theorem."""
        gamma = best_gamma(
            self.alphas[label(name)].alphas[temperature], self.costs.drafts[name], MAX_GAMMA
        )
        return Way(
            label(name), self.family.config(draft__path=str(DEMO / name)), max(1, gamma), (name,)
        )

    def hold(self, ways: list[Way], temperature: float) -> list[Result]:
        budget = self.budget
        how = {"turns": budget.turns, "threads": budget.threads, "max_tokens": budget.max_tokens}
        return hold(self.parts, ways, self.prompts, temperature=temperature, tell=self.tell, **how)


def speed(bench: Bench) -> Section:
    rows = []
    for temperature in TEMPERATURES:
        plain, *others = bench.hold(
            [bench.plain(), *(bench.neural(name, temperature) for name in (SMALL, DRAFT))],
            temperature,
        )
        rows += [
            _row(bench, name, temperature, result, plain)
            for name, result in zip((SMALL, DRAFT), others, strict=True)
        ]
    rows += [
        (
            row.task,
            row.draft,
            str(row.temperature),
            str(row.gamma),
            f"{row.alpha:.2f}",
            "",
            "",
            "",
            "",
            f"{row.factor:.1f}",
        )
        for row in TABLE_2
    ]
    text = (
        f"Judged by the {label('target')}, widened to {bench.family.params / 1e6:.0f}M parameters, which computes the same; draft and target take "
        f"turns in one process. gamma is the best by Theorem 3.8. The theorem takes a pass over gamma + 1 rows to cost what a pass over one costs; "
        f"the column behind it puts the measured time of that pass in its place. Published, below: T5-XXL on a TPU.\n\n"
    )
    heads = (
        "task",
        "draft",
        "T",
        "gamma",
        "alpha",
        "c",
        "theorem",
        "theorem, rows timed",
        "measured",
        "published",
    )
    return Section("Table 2 of 2211.17192: walltime", text + table(heads, rows))


def _row(
    bench: Bench, name: str, temperature: float, result: Result, plain: Result
) -> tuple[str, ...]:
    alpha, c, gamma = result.count.alpha, bench.costs.drafts[name], result.way.gamma
    timed = tokens_per_round(alpha, gamma) / (gamma * c + bench.costs.target[gamma + 1])
    return (
        "Python, held out",
        result.way.name,
        f"{temperature:g}",
        str(gamma),
        f"{alpha:.2f}",
        f"{c:.3f}",
        f"{walltime_factor(alpha, gamma, c):.2f}",
        f"{timed:.2f}",
        f"{result.against(plain):.2f}",
        "",
    )


def size_ratio(bench: Bench, name: str) -> float:
    """c as the papers' MS takes it: the ratio of the parameters."""
    return num_parameters(DEMO / name) / bench.family.params
