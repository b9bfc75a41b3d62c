"""Tables 2 and 3 of arXiv 2312.11462 with the demo family: cascades by SWI and by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.papers.contest import ContenderConfig, ContenderResult
from lab.papers.family import DRAFT, SMALL, readers
from lab.papers.page import Section, table
from lab.papers.speed import MAX_GAMMA, MeasuredSetup, size_ratio
from specserve.config.tree import DEMO
from specserve.drafters.registry import open_drafter
from specserve.errors import SpecserveError
from specserve.theory import best_gamma, standardized_walltime_improvement
from specserve.tools.plan.cascades import CascadeStage, Matrix, best_matrix
from specserve.tools.plan.measure import TEMPERATURES, TextDrafter, overlaps

MAX_GRAM, MAX_K = "max_gram", 16
CascadeStages = Mapping[tuple[str, ...], Sequence[CascadeStage]]
"""Stages of each cascade, by their names."""


@dataclass(frozen=True, slots=True)
class CascadeSetup:
    """Cascade to build: its kind, and its stages by name."""

    kind: str
    stages: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}: {' > '.join(self.stages)}"


CASCADES = (
    CascadeSetup("vertical", (DRAFT, MAX_GRAM)),
    CascadeSetup("horizontal", (DRAFT, SMALL)),
    CascadeSetup("horizontal", (DRAFT, MAX_GRAM)),
    CascadeSetup("cascade", (DRAFT, MAX_GRAM)),
    CascadeSetup("cascade", (DRAFT, SMALL, MAX_GRAM)),
)


def cascades(bench: MeasuredSetup) -> Section:
    rows = []
    for temperature, theory in _stages_by_temperature(bench).items():
        contenders, missing = _contenders(bench, theory, temperature)
        plain, *others = bench.run_in_turns([bench.plain(), *contenders], temperature)
        rows += [(f"{temperature:g}", *_row(bench, result, plain)) for result in (plain, *others)]
        rows += [
            (f"{temperature:g}", name, f"not available: {why}", "", "", "", "", "")
            for name, why in missing.items()
        ]
    text = (
        f"Batches of one, the target widened to {bench.family.params / 1e6:.0f}M parameters, "
        "drafts and target in turn in one process. SWI = tokens / (target passes + sum of passes x "
        "c); c by size is the ratio of the parameters, by time that of timed passes, and 0 for "
        "what needs no model. gamma and k are those that theory finds best with the acceptances "
        "measured on held-out text (of max_gram: those of its bigrams). The papers' own figures "
        "are of other models and tasks, and cannot be checked by a formula; they are not copied "
        "here.\n\n"
    )
    heads = (
        "T",
        "drafts",
        "gamma, k",
        "tokens a target pass",
        "alpha",
        "SWI, c by size",
        "SWI, c by time",
        "measured speed-up",
    )
    return Section("Tables 2 and 3 of 2312.11462: cascades", text + table(heads, rows))


def _stages_by_temperature(bench: MeasuredSetup) -> dict[float, CascadeStages]:
    """Return the measured alphas and costs of the stages, by temperature."""
    models = readers("target", DRAFT, SMALL)
    drafters: dict[str, TextDrafter] = {
        DRAFT: models[DRAFT],
        SMALL: models[SMALL],
        MAX_GRAM: bench.family.table_drafters()["bigram"],
    }
    accepted = {
        name: overlaps(model, drafters, bench.text, report_progress=bench.report_progress)
        for name, model in models.items()
    }
    costs = _costs(bench.costs.drafts)

    def stage(names: Sequence[str], i: int, temperature: float) -> CascadeStage:
        reviewers = ("target", *names[:i])
        return CascadeStage(
            tuple(accepted[reviewer][names[i]].alphas[temperature] for reviewer in reviewers),
            costs[names[i]],
        )

    chains = {setup.stages for setup in CASCADES} | {(MAX_GRAM,)}
    return {
        t: {names: [stage(names, i, t) for i in range(len(names))] for names in chains}
        for t in TEMPERATURES
    }


def _contenders(
    bench: MeasuredSetup, theory: CascadeStages, temperature: float
) -> tuple[list[ContenderConfig], dict[str, str]]:
    """Return the contenders that can be opened, and the reason for each of the others."""
    (alone,) = theory[(MAX_GRAM,)]
    gamma = max(1, best_gamma(alone.alphas[0], alone.cost, MAX_GAMMA))
    max_gram = bench.family.config(
        draft__kind=MAX_GRAM, draft__path=str(bench.family.tables), draft__learn=False
    )
    contenders = [
        bench.neural(SMALL, temperature),
        bench.neural(DRAFT, temperature),
        ContenderConfig(MAX_GRAM, max_gram, gamma, (MAX_GRAM,)),
    ]
    missing: dict[str, str] = {}
    for setup in CASCADES:
        try:
            contenders.append(
                _contender(bench, setup, best_matrix(setup.kind, theory[setup.stages], MAX_K))
            )
            open_drafter(contenders[-1].config, target_vocab_size=bench.parts.info.vocab_size)
        except SpecserveError as error:
            missing[setup.name] = str(error)
            contenders = [contender for contender in contenders if contender.name != setup.name]
    return contenders, missing


def _contender(bench: MeasuredSetup, setup: CascadeSetup, k: Matrix) -> ContenderConfig:
    tables = {"kind": MAX_GRAM, "path": str(bench.family.tables)}
    stages = [
        tables if name == MAX_GRAM else {"kind": "neural", "path": str(DEMO / name)}
        for name in setup.stages
    ]
    config = bench.family.config(
        draft__kind=setup.kind, draft__stages=stages, draft__k=[list(row) for row in k]
    )
    return ContenderConfig(
        setup.name, config, sum(k[0]), setup.stages, str([list(row) for row in k])
    )


def _row(bench: MeasuredSetup, result: ContenderResult, plain: ContenderResult) -> tuple[str, ...]:
    count, contender = result.count, result.spec
    return (
        contender.name,
        contender.k or str(contender.gamma),
        f"{count.tokens / count.rounds:.2f}",
        f"{count.alpha:.2f}" if count.verified else "",
        _swi(result, {name: size_ratio(bench, name) for name in (SMALL, DRAFT)}),
        _swi(result, bench.costs.drafts),
        f"{result.speedup_over(plain):.2f}",
    )


def _swi(result: ContenderResult, drafts: Mapping[str, float]) -> str:
    if result.passes is None:
        return ""
    costs = [_costs(drafts)[name] for name in result.spec.stages]
    counts = result.count
    swi = standardized_walltime_improvement(counts.tokens, counts.rounds, result.passes, costs)
    return f"{swi:.2f}"


def _costs(drafts: Mapping[str, float]) -> Mapping[str, float]:
    return {**drafts, MAX_GRAM: 0.0}
