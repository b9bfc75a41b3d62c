"""Tables 2 and 3 of 2312.11462 with the demo family: speculation, max-gram and cascades by SWI and by the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specserve.config.tree import DEMO
from specserve.drafters.registry import open_drafter
from specserve.errors import SpecserveError
from specserve.theory import best_gamma, standardized_walltime_improvement
from specserve.tools.plan.cascades import Matrix, Stage, best_matrix
from specserve.tools.plan.measure import TEMPERATURES, Guesser, overlaps
from specserve.tools.reproduce.contest import Result, Way
from specserve.tools.reproduce.family import DRAFT, SMALL, readers
from specserve.tools.reproduce.page import Section, table
from specserve.tools.reproduce.speed import MAX_GAMMA, Bench, size_ratio

MAX_GRAM, MAX_K = "max_gram", 16
Theory = Mapping[tuple[str, ...], Sequence[Stage]]  # by the names of the stages


@dataclass(frozen=True, slots=True)
class Asked:
    """A cascade to be built: its kind, and its stages by name."""

    kind: str
    stages: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}: {' > '.join(self.stages)}"


ASKED = (
    Asked("vertical", (DRAFT, MAX_GRAM)),
    Asked("horizontal", (DRAFT, SMALL)),
    Asked("horizontal", (DRAFT, MAX_GRAM)),
    Asked("cascade", (DRAFT, MAX_GRAM)),
    Asked("cascade", (DRAFT, SMALL, MAX_GRAM)),
)


def cascades(bench: Bench) -> Section:
    rows = []
    for temperature, theory in _theories(bench).items():
        ways, missing = _ways(bench, theory, temperature)
        plain, *others = bench.hold([bench.plain(), *ways], temperature)
        rows += [(f"{temperature:g}", *_row(bench, result, plain)) for result in (plain, *others)]
        rows += [
            (f"{temperature:g}", name, f"not available: {why}", "", "", "", "", "")
            for name, why in missing.items()
        ]
    text = (
        f"Batches of one, the target widened to {bench.family.params / 1e6:.0f}M parameters, drafts and target in turn in one process. "
        "SWI = tokens / (target passes + sum of passes x c); c by size is the ratio of the parameters, by time that of timed passes, and 0 for what "
        "needs no model. gamma and k are those that theory finds best with the acceptances measured on held-out text (of max_gram: those of its "
        "bigrams). The papers' own figures are of other models and tasks, and cannot be checked by a formula; they are not copied here.\n\n"
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


def _theories(bench: Bench) -> dict[float, Theory]:
    """How the stages of each cascade accept one another, by temperature."""
    models = readers("target", DRAFT, SMALL)
    guessers: dict[str, Guesser] = {
        DRAFT: models[DRAFT],
        SMALL: models[SMALL],
        MAX_GRAM: bench.family.tabled()["bigram"],
    }
    accepted = {
        name: overlaps(model, guessers, bench.text, tell=bench.tell)
        for name, model in models.items()
    }
    costs = _costs(bench.costs.drafts)

    def stage(names: Sequence[str], place: int, temperature: float) -> Stage:
        reviewers = ("target", *names[:place])
        return Stage(
            tuple(accepted[reviewer][names[place]].alphas[temperature] for reviewer in reviewers),
            costs[names[place]],
        )

    chains = {asked.stages for asked in ASKED} | {(MAX_GRAM,)}
    return {
        t: {names: [stage(names, place, t) for place in range(len(names))] for names in chains}
        for t in TEMPERATURES
    }


def _ways(bench: Bench, theory: Theory, temperature: float) -> tuple[list[Way], dict[str, str]]:
    """Those that can be opened; of the others, why not."""
    (alone,) = theory[(MAX_GRAM,)]
    gamma = max(1, best_gamma(alone.alphas[0], alone.cost, MAX_GAMMA))
    max_gram = bench.family.config(
        draft__kind=MAX_GRAM, draft__path=str(bench.family.tables), draft__learn=False
    )
    ways = [
        bench.neural(SMALL, temperature),
        bench.neural(DRAFT, temperature),
        Way(MAX_GRAM, max_gram, gamma, (MAX_GRAM,)),
    ]
    missing: dict[str, str] = {}
    for asked in ASKED:
        try:
            ways.append(_way(bench, asked, best_matrix(asked.kind, theory[asked.stages], MAX_K)))
            open_drafter(ways[-1].config, target_vocab_size=bench.parts.info.vocab_size)
        except SpecserveError as error:
            missing[asked.name] = str(error)
            ways = [way for way in ways if way.name != asked.name]
    return ways, missing


def _way(bench: Bench, asked: Asked, k: Matrix) -> Way:
    tables = {"kind": MAX_GRAM, "path": str(bench.family.tables)}
    stages = [
        tables if name == MAX_GRAM else {"kind": "neural", "path": str(DEMO / name)}
        for name in asked.stages
    ]
    config = bench.family.config(
        draft__kind=asked.kind, draft__stages=stages, draft__k=[list(row) for row in k]
    )
    return Way(asked.name, config, sum(k[0]), asked.stages, str([list(row) for row in k]))


def _row(bench: Bench, result: Result, plain: Result) -> tuple[str, ...]:
    count, way = result.count, result.way
    return (
        way.name,
        way.k or str(way.gamma),
        f"{count.tokens / count.rounds:.2f}",
        f"{count.alpha:.2f}" if count.judged else "",
        _swi(result, {name: size_ratio(bench, name) for name in (SMALL, DRAFT)}),
        _swi(result, bench.costs.drafts),
        f"{result.against(plain):.2f}",
    )


def _swi(result: Result, drafts: Mapping[str, float]) -> str:
    if result.passes is None:
        return ""
    costs = [_costs(drafts)[name] for name in result.way.stages]
    return f"{standardized_walltime_improvement(result.count.tokens, result.count.rounds, result.passes, costs):.2f}"


def _costs(drafts: Mapping[str, float]) -> Mapping[str, float]:
    return {**drafts, MAX_GRAM: 0.0}
