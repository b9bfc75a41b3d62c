"""Sampled continuations of whole engines beside their exact distribution under the target.

`python -m tests.proofs.distribution` writes docs/measurements/proofs.md with it;
tests/proofs/test_distribution.py does the same with fewer samples. `--quick` takes a few cases and
few samples, and prints the page.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from specserve.host import usable_cores
from specserve.types import VERIFIERS
from tests.support.cascade_engines import CASCADES, Cascades
from tests.support.chi_square import MIN_EXPECTED, Acceptance, Fit, ScoreTest
from tests.support.continuations import (
    COUNTED,
    DIRECTION,
    DRAFTERS,
    PROMPTS,
    VOCAB,
    WARPS,
    Case,
    Group,
    Pairs,
    Result,
    coupled_texts,
    sample,
)
from tests.support.self_speculative_engines import SELF_SPECULATIVE, SelfSpeculativePairs

log = logging.getLogger("proofs")

SEEDS_APART = 1 << 32
FAIL_BELOW = 2e-5
"""A p-value below it is a failure. One run in a hundred of an exact engine has such a failure."""
REPEAT_BELOW = 0.01
"""A case, or all cases of a verifier, with a p-value below it is repeated with fresh seeds."""
STANDS_BELOW = 1e-3
"""A p-value of a repetition below it is a failure."""
REPEAT_FACTOR = 5
"""Times the continuations of such a repetition."""
CONTROL_FACTOR = 4
"""Times the continuations of a lossy control."""
CONTROLS = (1.1, 1.2, 2.0)
"""Leniences that must be told from 1."""
COUPLED_SEEDS = 1_000_000
"""Seeds of a coupled case that is repeated, drawn without an engine."""
QUICK_SAMPLES = 150

INTRODUCTION = f"""# The engine writes what the target would write: sampled proofs

Written by `python -m tests.proofs.distribution`. Requests go through a whole engine (coordinator,
scheduler, paged caches with prefix caching, neural drafter, target, verifier) in fp32 over tiny
Llama checkpoints with {VOCAB} ids, some hundreds at once. Prompts, and in the `mixed` cases warps,
share every batch; pages are so few that sequences are preempted and recomputed in mid-text. No
two requests have the same seed.

The first {COUNTED} tokens of each continuation are counted. Their exact distribution comes from
the `transformers` library's own model in float64, by enumeration of all {VOCAB**COUNTED:,}
continuations of each of {len(PROMPTS)} prompts under each warp. Chi-square over cells of at
least {MIN_EXPECTED:.0f} expected samples; neighbouring continuations share a cell until it is
full.

Chi-square looks in all directions. *Towards q* looks in the one in which a rule that accepts too
much goes: the score of each continuation is the derivative of its log-likelihood in the direction
of `lenient` with a lenience of {DIRECTION}, whose distribution is enumerated like the target's; the
column says by how many standard errors its sum is off its exact expectation under the target.

*alpha* is the acceptance of the first draft token of a round at temperature 1. Expected is what
the two models' own p and q say on the same prefixes: the sum of min(p, q), or, under `coupled`,
the probability that two draws with the same Gumbel noise agree. (There is no such formula under
`block` with gamma > 1, where later draft tokens affect the first, nor where more masks, a lenience
within the drafter, or what was prepared for does.)

- **drafters**: `full` draws from all ids, `top 3` from the three likeliest and has three
  quarters of the pages, `7 of 8 ids` lacks an id of the target, `none` drafts nothing. `other
  tokens` has another tokenizer: six of the target's tokens in another order, and a support of four.
  `layer_skip` and `heads` are tied to a target of three layers: one without the second layer,
  on the target's own pages; the other with random heads, and, as `top 3 heads`, with a support
  of three. `eagle` is a random EAGLE-3 head of the same target with pages of its own, and a
  second one knows 6 of 8 ids. `eagle apart` is the first one in a draft worker, and `eagle ahead`
  the second one, which anticipates there. `eagle block` is a random P-EAGLE head of two layers,
  which draws all its draft tokens in one pass. `dflash` is a random DFlash draft, whose rows see
  the masks after them; in `dflash, causal` they do not; `dspark` has a Markov head and 6 ids. The
  others are cascades
  ([cascades](../design/drafters.md#cascades)): largest stage first, each smaller one agrees less.
- **gamma**: `random` is another gamma from 0 to 4 for each sequence in each round.
- **warps**: `truncated` is temperature 0.7 with top-k and top-p; `mixed` has requests at
  temperature 1, truncated, with penalties (presence, frequency, repetition), with min-p and
  biases, with token rules, and greedy ones, side by side; `ruled` has requests at temperature
  1, with a least number of tokens and bad words, and with few allowed ids.
- **verifiers**: `each` is all four side by side in every batch. `lenient` has lenience 1 where
  nothing else is said.
"""

CASE_HEAD = """| verifier | drafter | gamma | warps | continuations | chi-square | dof | p | \
towards q | drafts accepted | preempted | alpha measured | expected |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""

POOL_HEAD = """| verifier | continuations | chi-square | dof | p | towards q | alpha measured | \
expected | standard errors off |
|---|---|---|---|---|---|---|---|---|"""
RULE = f"""Among hundreds of right p-values some are small. The rule for them is fixed beforehand: a
case with a p below {REPEAT_BELOW} in either test is repeated once, with fresh seeds and
{REPEAT_FACTOR} times the continuations, and so are all cases of a verifier with such a p together.
The command fails if a p of a repetition is below {STANDS_BELOW}, alone or together, or any p of a
case below {FAIL_BELOW:.0e}. What is repeated keeps its row."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Samples of one case beside the exact distribution of the target, and of a lossy rule."""

    result: Result
    fit: Fit
    score: ScoreTest
    own_fit: Fit

    @property
    def case(self) -> Case:
        return self.result.case

    @property
    def p_value(self) -> float:
        """The smaller of the two tests' p-values."""
        return min(self.fit.p_value, self.score.p_value)

    @property
    def holds(self) -> bool:
        """True if the samples fit what they must, and a lossy rule's samples do not fit the target.

        A deviation away from q does not show that a lossy rule is caught.
        """
        if self.case.is_lossless:
            return self.p_value >= FAIL_BELOW
        caught = self.score.p_value < FAIL_BELOW and self.score.num_standard_errors > 0
        return caught and self.own_fit.p_value >= FAIL_BELOW


def all_cases() -> Iterator[Case]:
    for verifier in VERIFIERS:
        yield from (
            Case(verifier, drafter, gamma) for drafter in DRAFTERS for gamma in (1, 2, 4, None)
        )
        yield from (
            Case(verifier, drafter, None, warps)
            for drafter in DRAFTERS
            for warps in ("truncated", "mixed", "ruled")
        )
        yield from (
            Case(verifier, drafter, gamma)
            for drafter in (*CASCADES, *SELF_SPECULATIVE)
            for gamma in (1, 4, None)
        )
    yield from (
        Case("each", drafter, None, "mixed")
        for drafter in (*DRAFTERS, *CASCADES, *SELF_SPECULATIVE)
    )
    yield from (Case("each", "none", 0, warps) for warps in WARPS)
    yield from (Case("each", "full", 0, warps) for warps in WARPS)
    yield from (Case("lenient", "full", COUNTED, lenience=lenience) for lenience in CONTROLS)


def quick_cases() -> Iterator[Case]:
    yield from (Case(verifier, "top 3", 2) for verifier in VERIFIERS)
    yield Case("each", "cascade", None)
    yield Case("block", "layer_skip", None)
    yield Case("lenient", "full", COUNTED, lenience=CONTROLS[-1])


def prove(pairs: Pairs, numbered: Iterable[tuple[int, Case]], samples: int) -> Iterator[Proof]:
    """Sample each case with `samples` continuations, controls with more, and yield its proof.

    No two requests of all cases have the same seed.
    """
    for number, case in numbered:
        size = samples if case.is_lossless else CONTROL_FACTOR * samples
        result = sample(pairs, case, samples=size, first_seed=number * SEEDS_APART)
        fit = pairs.fit(result)
        own_fit = fit if case.is_lossless else pairs.fit_lenient(result)
        proof = Proof(result, fit, pairs.score_test(result), own_fit)
        log.info(
            "%s: p %.3g, %+.1f towards q, %.0f continuations a second",
            case,
            proof.fit.p_value,
            proof.score.num_standard_errors,
            result.samples / result.seconds,
        )
        yield proof


def prove_all(numbered: Sequence[tuple[int, Case]], samples: int, *, jobs: int) -> list[Proof]:
    """Prove the cases in several processes, and return the proofs in the order of the cases."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_start) as pool:
        shares = list(
            pool.map(_share, [numbered[first::jobs] for first in range(jobs)], [samples] * jobs)
        )
    return [shares[i % jobs][i // jobs] for i in range(len(numbered))]


@dataclass(frozen=True, slots=True)
class Pool:
    """All cases of a verifier over one target, the counts of each prompt and warp added up."""

    name: str
    proofs: Sequence[Proof]
    fit: Fit
    score: ScoreTest

    @property
    def p_value(self) -> float:
        """The smaller of the two tests' p-values."""
        return min(self.fit.p_value, self.score.p_value)


def pools(proofs: Sequence[Proof]) -> Iterator[Pool]:
    for pairs_class, name in ((Cascades, "{}"), (SelfSpeculativePairs, "{}, tied drafters")):
        over = [
            proof
            for proof in proofs
            if proof.case.is_lossless and _pairs_class(proof.case) is pairs_class
        ]
        if not over:
            continue
        with tempfile.TemporaryDirectory() as directory:
            pairs = pairs_class(Path(directory))
            for verifier in (*VERIFIERS, "each"):
                if own := [proof for proof in over if proof.case.verifier == verifier]:
                    results = [proof.result for proof in own]
                    fit, score = pairs.fit(*results), pairs.score_test(*results)
                    yield Pool(name.format(verifier), own, fit, score)


def cases_to_repeat(proofs: Sequence[Proof], pooled: Sequence[Pool]) -> list[tuple[int, Case]]:
    """Return the cases that are outliers, alone or together, with numbers that no case had."""
    outliers = {
        id(proof) for pool in pooled if pool.p_value < REPEAT_BELOW for proof in pool.proofs
    }
    return [
        (len(proofs) + i, proof.case)
        for i, proof in enumerate(proofs)
        if proof.case.is_lossless and (proof.p_value < REPEAT_BELOW or id(proof) in outliers)
    ]


def _start() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)


def _share(numbered: Sequence[tuple[int, Case]], samples: int) -> list[Proof]:
    """Prove one process's cases; self-speculative drafters have a target with more layers."""
    tied = {number for number, case in numbered if case.drafter in SELF_SPECULATIVE}
    proofs: dict[int, Proof] = {}
    for own, pairs in (
        (tied, SelfSpeculativePairs),
        ({number for number, _ in numbered} - tied, Cascades),
    ):
        with tempfile.TemporaryDirectory() as directory:
            mine = [one for one in numbered if one[0] in own]
            proofs |= (
                dict(
                    zip(
                        [number for number, _ in mine],
                        prove(pairs(Path(directory)), mine, samples),
                        strict=True,
                    )
                )
                if mine
                else {}
            )
    return [proofs[number] for number, _ in numbered]


def page(
    proofs: Sequence[Proof],
    again: Sequence[Proof],
    *,
    pooled: Sequence[Pool],
    jobs: int,
    seconds: float,
) -> str:
    lossless = [proof for proof in proofs if proof.case.is_lossless]
    p_values = [proof.fit.p_value for proof in lossless]
    scores = [proof.score.num_standard_errors for proof in lossless if proof.score.variance]
    known = [proof.result.acceptance for proof in lossless if proof.result.acceptance is not None]
    deviations = [abs(acceptance.num_standard_errors) for acceptance in known if acceptance.rounds]
    return f"""{INTRODUCTION}
## Result

{_count(proof.result.samples for proof in proofs)} continuations, with \
{_count(proof.result.preempted for proof in proofs)} preemptions and
{_count(proof.result.drafted - proof.result.accepted for proof in proofs)} rejected draft tokens \
on the way. Of the {len(lossless)} lossless cases
the smallest p-value is {min(p_values):.4f}; among so many right ones it is that small in \
{1 - (1 - min(p_values)) ** len(p_values):.0%} of all runs.
All their p-values together (Fisher): {stats.combine_pvalues(p_values).pvalue:.2f}.
Towards q the cases are off by {max(abs(score) for score in scores):.1f} standard errors at \
most, by {np.std(scores):.2f} in root mean square
(1 if exact).
In {len(deviations)} cases alpha is known: the measured one is off by \
{max(deviations):.1f} standard errors at most.

All cases of a verifier together, the counts of each prompt and warp added up:

{POOL_HEAD}
{_lines(map(_pool_row, pooled))}

{RULE}

## Case by case

{CASE_HEAD}
{_lines(_row(proof) for proof in lossless)}

{_second_look(again)}## What the test catches

`lenient` with a lenience above 1 is lossy by design. The tests distinguish it from the target;
its own distribution, enumerated from p and q, it fits:

| lenience | drafter | gamma | continuations | chi-square | dof | p | towards q | p of it | \
chi-square to its own distribution | dof | p |
|---|---|---|---|---|---|---|---|---|---|---|---|
{_lines(_lossy_row(proof) for proof in proofs if not proof.case.is_lossless)}

{_sensitivity(proofs)}

Measured on {time.strftime("%Y-%m-%d")}, {_processor()}, {usable_cores()} cores shared with other \
work, {jobs} processes of one thread each,
{seconds / 60:.0f} minutes: `python -m tests.proofs.distribution {" ".join(sys.argv[1:])}`.
"""


def _second_look(again: Sequence[Proof]) -> str:
    if not again:
        return ""
    return f"""The cases that are repeated, with fresh seeds and {REPEAT_FACTOR} times the \
continuations:

{CASE_HEAD}
{_lines(map(_row, again))}

The same together, by verifier:

{POOL_HEAD}
{_lines(map(_pool_row, pools(again)))}

{_without_engine([proof.case for proof in again if proof.case.verifier == "coupled"])}"""


def _without_engine(cases: Sequence[Case]) -> str:
    """Return what many seeds of these coupled cases give without an engine."""
    if not cases:
        return ""
    lines = []
    for number, case in enumerate(cases):
        with tempfile.TemporaryDirectory() as directory:
            pairs = _pairs_class(case)(Path(directory))
            fit = _fit_of_coupled_draws(pairs, case, first_seed=number * SEEDS_APART)
        lines.append(f"- {case.drafter}, {case.warps}: p = {fit.p_value:.2f}")
    texts = "\n".join(lines)
    return f"""Under `coupled` a text is a function of its seed and the target alone \
(tests/proofs/test_distribution.py compares
the texts), so these cases can go on without the engine: {COUPLED_SEEDS:,} seeds each, drawn \
straight from the exact p.

{texts}

"""


def _fit_of_coupled_draws(pairs: Pairs, case: Case, *, first_seed: int) -> Fit:
    fit, warps = Fit(), WARPS[case.warps]
    groups = [Group(prompt, warp) for warp in warps for prompt in PROMPTS]
    for i, group in enumerate(groups):
        if group.warp.temperature:
            seeds = first_seed + np.arange(i, COUPLED_SEEDS, len(groups))
            counts = np.bincount(coupled_texts(pairs, group, seeds), minlength=VOCAB**COUNTED)
            fit.add(counts, pairs.joint(group))
    return fit


def _pairs_class(case: Case) -> type[Cascades | SelfSpeculativePairs]:
    return SelfSpeculativePairs if case.drafter in SELF_SPECULATIVE else Cascades


def _sensitivity(proofs: Sequence[Proof]) -> str:
    """Say what all continuations of a verifier would show, by the strongest control's score."""
    controls = [proof for proof in proofs if not proof.case.is_lossless]
    if not controls:
        return ""
    proof = min(controls, key=lambda proof: abs(proof.case.lenience - DIRECTION))
    samples = sum(p.result.samples for p in proofs if p.case.verifier == VERIFIERS[0])
    errors = proof.score.num_standard_errors * (samples / proof.result.samples) ** 0.5
    least = 1 + 4 * (proof.case.lenience - 1) / max(errors, 1e-9)
    return f"""A deviation of four standard errors, in the {samples:,} continuations of a verifier \
together, would be that of a lenience
of {least:.3f}, by the row of {proof.case.lenience:g}."""


def _pool_row(pool: Pool) -> tuple[object, ...]:
    acceptance = Acceptance()
    for proof in pool.proofs:
        if proof.result.acceptance is not None:
            acceptance.merge(proof.result.acceptance)
    known = _alpha(acceptance) if acceptance.rounds else ("", "")
    off = f"{acceptance.num_standard_errors:+.1f}" if acceptance.rounds else ""
    return (
        pool.name,
        _count(proof.result.samples for proof in pool.proofs),
        *_chi_square(pool.fit),
        f"{pool.score.num_standard_errors:+.1f}",
        *known,
        off,
    )


def _row(proof: Proof) -> tuple[object, ...]:
    case, result = proof.case, proof.result
    gamma = "random" if case.gamma is None else case.gamma
    accepted = f"{result.accepted / result.drafted:.2f}" if result.drafted else ""
    known = (
        _alpha(result.acceptance) if result.acceptance and result.acceptance.rounds else ("", "")
    )
    return (
        case.verifier,
        case.drafter,
        gamma,
        case.warps,
        f"{result.samples:,}",
        *_chi_square(proof.fit),
        f"{proof.score.num_standard_errors:+.1f}",
        accepted,
        result.preempted,
        *known,
    )


def _lossy_row(proof: Proof) -> tuple[object, ...]:
    return (
        proof.case.lenience,
        proof.case.drafter,
        proof.case.gamma,
        f"{proof.result.samples:,}",
        *_chi_square(proof.fit),
        f"{proof.score.num_standard_errors:+.1f}",
        _p_value(proof.score.p_value),
        *_chi_square(proof.own_fit),
    )


def _chi_square(fit: Fit) -> tuple[str, int, str]:
    return f"{fit.chi2:.0f}", fit.dof, _p_value(fit.p_value)


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}" if p > 0 else "< 1e-300"


def _alpha(acceptance: Acceptance) -> tuple[str, str]:
    return (
        f"{acceptance.measured_alpha:.4f}",
        f"{acceptance.expected_alpha:.4f} ± {acceptance.standard_error:.4f}",
    )


def _lines(rows: Iterable[tuple[object, ...]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def _count(numbers: Iterable[int]) -> str:
    return f"{sum(numbers):,}"


def _processor() -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return models[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--samples",
        type=int,
        default=200_000,
        help="continuations for each verifier, shared by its cases",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="file to write; the page is printed without it")
    parser.add_argument("--quick", action="store_true", help="a few cases, in this process")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.quick:
        proofs, again = _share(list(enumerate(quick_cases())), QUICK_SAMPLES), list[Proof]()
        pooled = list(pools(proofs))
    else:
        cases = list(all_cases())
        per_case = options.samples // sum(case.verifier == VERIFIERS[0] for case in cases)
        proofs = prove_all(list(enumerate(cases)), per_case, jobs=options.jobs)
        pooled = list(pools(proofs))
        numbered = cases_to_repeat(proofs, pooled)
        again = prove_all(numbered, REPEAT_FACTOR * per_case, jobs=options.jobs)
    jobs = 1 if options.quick else options.jobs
    text = page(proofs, again, pooled=pooled, jobs=jobs, seconds=time.perf_counter() - began)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)
    holds = all(proof.holds for proof in proofs)
    repeated: list[Proof | Pool] = [*again, *pools(again)]
    return 0 if holds and all(one.p_value >= STANDS_BELOW for one in repeated) else 1


if __name__ == "__main__":
    sys.exit(main())
