"""Table 2 of arXiv 2211.17192 with the demo family: measured factor beside Theorem 3.8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.papers.acceptances import measure_overlaps
from lab.papers.contest import (
    ContenderConfig,
    ContenderResult,
    Prompts,
    run_in_turns,
)
from lab.papers.family import (
    DRAFT,
    SMALL,
    DemoFamily,
    ReproduceBudget,
    label,
    num_parameters,
    reader,
    readers,
)
from lab.papers.page import Section, table
from lab.papers.published import TABLE_2
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts, held_out_tokens
from specserve.llm.inprocess import EngineParts, open_parts
from specserve.progress import ReportProgress
from specserve.theory import best_gamma, tokens_per_round, walltime_factor
from specserve.tools.plan.measure import TEMPERATURES, Overlap, seconds

PROMPT_TOKENS = 64
MAX_GAMMA = 10
ROWS = tuple(range(1, MAX_GAMMA + 2))


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Time of passes over that of a target pass with one row.

    `target` is by rows: the theorem assumes that verification costs a plain pass.
    """

    drafts: Mapping[str, float]
    target: Mapping[int, float]

    @classmethod
    def from_family(cls, family: DemoFamily, report_progress: ReportProgress) -> PassCosts:
        """Time the passes in turns, on the widened target."""
        target = reader(family.target)
        passes = {f"{rows} rows": target.pass_seconds(rows) for rows in ROWS}
        taken = seconds(
            passes | {name: own.pass_seconds(1) for name, own in readers(SMALL, DRAFT).items()},
            report_progress=report_progress,
        )
        one = taken["1 rows"]
        return cls(
            {name: taken[name] / one for name in (SMALL, DRAFT)},
            {rows: taken[f"{rows} rows"] / one for rows in ROWS},
        )


@dataclass(frozen=True, slots=True)
class MeasuredSetup:
    """Inputs of the measured tables.

    `parts` is the engine that decodes plainly, whose target the others share; alpha is measured on
    `text`.
    """

    family: DemoFamily
    budget: ReproduceBudget
    costs: PassCosts
    alphas: Mapping[str, Overlap]
    parts: EngineParts
    prompts: Prompts
    text: Sequence[int]
    report_progress: ReportProgress

    @classmethod
    def open(
        cls, family: DemoFamily, budget: ReproduceBudget, report_progress: ReportProgress
    ) -> MeasuredSetup:
        costs, alphas, text = (
            PassCosts.from_family(family, report_progress),
            measure_overlaps(family, budget, report_progress),
            held_out_tokens(budget.text_tokens),
        )
        prompts = held_out_prompts(count=budget.prompts, length=PROMPT_TOKENS)
        return cls(
            family,
            budget,
            costs,
            alphas,
            open_parts(family.config(draft__kind="none")),
            prompts,
            text,
            report_progress,
        )

    def plain(self) -> ContenderConfig:
        return ContenderConfig("autoregressive", self.family.config(draft__kind="none"), 0)

    def neural(self, name: str, temperature: float) -> ContenderConfig:
        """Return the contender with a neural draft and the gamma that the theorem finds best."""
        gamma = best_gamma(
            self.alphas[label(name)].alphas[temperature], self.costs.drafts[name], MAX_GAMMA
        )
        return ContenderConfig(
            label(name), self.family.config(draft__path=str(DEMO / name)), max(1, gamma), (name,)
        )

    def run_in_turns(
        self, contenders: list[ContenderConfig], temperature: float
    ) -> list[ContenderResult]:
        budget = self.budget
        options = {
            "turns": budget.turns,
            "threads": budget.threads,
            "max_tokens": budget.max_tokens,
        }
        return run_in_turns(
            self.parts,
            contenders,
            self.prompts,
            temperature=temperature,
            report_progress=self.report_progress,
            **options,
        )


def speed(bench: MeasuredSetup) -> Section:
    rows = []
    for temperature in TEMPERATURES:
        plain, *others = bench.run_in_turns(
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
        f"Verified by the {label('target')}, widened to {bench.family.params / 1e6:.0f}M "
        "parameters, which computes the same; draft and target take turns in one process. gamma is "
        "the best by Theorem 3.8. The theorem takes a pass over gamma + 1 rows to cost what a pass "
        "over one costs; the column behind it puts the measured time of that pass in its place. "
        "Published, below: T5-XXL on a TPU.\n\n"
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
    bench: MeasuredSetup,
    name: str,
    temperature: float,
    result: ContenderResult,
    plain: ContenderResult,
) -> tuple[str, ...]:
    alpha, c, gamma = result.count.alpha, bench.costs.drafts[name], result.spec.gamma
    timed = tokens_per_round(alpha, gamma) / (gamma * c + bench.costs.target[gamma + 1])
    return (
        "Python, held out",
        result.spec.name,
        f"{temperature:g}",
        str(gamma),
        f"{alpha:.2f}",
        f"{c:.3f}",
        f"{walltime_factor(alpha, gamma, c):.2f}",
        f"{timed:.2f}",
        f"{result.speedup_over(plain):.2f}",
        "",
    )


def size_ratio(bench: MeasuredSetup, name: str) -> float:
    """Return c as the paper's MS takes it: the ratio of the parameters."""
    return num_parameters(DEMO / name) / bench.family.params
