"""Short continuations sampled through a whole engine over tiny checkpoints.

A target has several drafters and few pages, and every batch mixes requests of all kinds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedConfig

from specserve.sampling import Purpose, exponential, row_keys
from specserve.sampling import sample as draw
from specserve.types import VERIFIERS, Origin, Request, Speculation, TokenRule, Warp
from tests.support import checkpoints
from tests.support.chi_square import Acceptance, Fit, ScoreTest
from tests.support.engines import PAGE_SIZE, Answer, Engine, RandomPacer
from tests.support.exact_distribution import (
    Conditionals,
    Floats,
    Ints,
    LibraryModel,
    TranslatedModel,
    agreement,
    lenient,
    on_support,
    overlap,
)

if TYPE_CHECKING:
    from specserve.features.other_tokenizer.translation import TokenTranslation

VOCAB, COUNTED = 8, 4  # 4,096 continuations of each prompt are counted apart
MAX_GAMMA = 4
PROMPTS = (  # the pages that admission reserves just suffice at first
    (1, 2, 3, 0, 5, 6, 7, 4, 1, 1, 6, 3),
    (4, 6, 1, 0, 2, 3, 3, 5, 2, 7, 6),
    (*range(8), *range(7, -1, -1), 2, 7, 1, 0, 2, 6, 1, 5, 3, 4, 0),
)
DIRECTION = 1.2
"""Lenience of the alternative whose direction the score test looks in."""
LEAST_P = 1e-3
"""A p-value below it flags the samples of a case."""
CONTROL_SEED = 1 << 50
CONTROL_LENIENCE = 2.0
"""Lenience of a verifier that each sampled case must tell from its own."""
TAIL = 2
"""Tokens generated beyond those counted and gamma.

Without them no sequence would outgrow the pages that admission reserves, and none be preempted.
"""
PAGES = 310
RUNNING = 256
BATCH_TOKENS = 4096
AT_ONCE = 4096
LOGIT_DIVISOR = 2.5  # of the target, so that all continuations occur
NOISE = 0.25  # of the draft's weights, so that most draft tokens are accepted

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}

PLAIN = Warp()
TRUNCATED = Warp(temperature=0.7, top_k=5, top_p=0.85)
PENALIZED = Warp(
    temperature=0.7, top_k=6, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.3
)
BIASED = Warp(temperature=1.4, min_p=0.05, logit_bias=((3, 1.5), (6, -2.0)))
RULED = Warp(rule=TokenRule(2, (2,), ((5,), (1, 3), (6, 1, 0))))
NARROW = Warp(temperature=0.7, rule=TokenRule(0, (), ((0, 1), (3, 3), (3, 0), (3, 1)), (0, 1, 3)))
"""After 3 its bad words would leave none of the allowed ids, and are not applied."""
WARPS = {
    "T = 1": (PLAIN,),
    "truncated": (TRUNCATED,),
    "mixed": (PLAIN, TRUNCATED, PENALIZED, BIASED, Warp(temperature=0), RULED, NARROW),
    "ruled": (PLAIN, RULED, NARROW),
}


ROWS = {VOCAB: range(VOCAB), 7: range(7), "other": (7, 3, 0, 2, 1, 4, 5)}
"""Rows of the target's embedding that each draft has, by its vocabulary."""


def make_translation() -> TokenTranslation:
    """Return one to a draft with six of the target's tokens, reordered, and a token of its own."""
    from specserve.features.other_tokenizer.translation import TokenTranslation

    return TokenTranslation(
        target_ids=np.array([0, 1, 2, 3, 5, 7]),
        draft_ids=np.array([2, 4, 3, 1, 6, 0]),
        spellings=((2,), (4,), (3,), (1,), (2, 4), (6,), (1, 2, 4), (0,)),
        prefix=(3,),
    )


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter: the vocabulary of its checkpoint, the width of q, its pages."""

    vocab: int | str = VOCAB
    support: int = VOCAB
    pages: int = PAGES
    ahead: bool = False  # whether it anticipates

    @property
    def translation(self) -> TokenTranslation | None:
        return make_translation() if self.vocab == "other" else None


DRAFTERS = {
    "full": DrafterSpec(),
    "top 3": DrafterSpec(support=3, pages=PAGES * 3 // 4),
    "7 of 8 ids": DrafterSpec(vocab=7),
    "ahead": DrafterSpec(support=3, pages=2 * PAGES, ahead=True),
    "other tokens": DrafterSpec("other", support=4),
    "other ahead": DrafterSpec("other", support=4, pages=3 * PAGES, ahead=True),
}
ALL_SHARED = DrafterSpec("other")
"""What coupled draft tokens of another tokenizer are drawn from; no engine has it."""


@dataclass(frozen=True, slots=True)
class Case:
    verifier: str  # "each": another for each request
    drafter: str  # of DRAFTERS, or "none"
    gamma: int | None  # None: another for each sequence in each round
    warps: str = "T = 1"  # of WARPS
    lenience: float = 1.0

    @property
    def is_lossless(self) -> bool:
        return self.lenience == 1

    @property
    def largest_gamma(self) -> int:
        return MAX_GAMMA if self.gamma is None else self.gamma


@dataclass(frozen=True, slots=True)
class Group:
    """Prompt and warp, which determine the distribution of a continuation."""

    prompt: tuple[int, ...]
    warp: Warp


@dataclass(slots=True)
class Result:
    case: Case
    # of each continuation, [VOCAB**COUNTED]
    counts: dict[Group, Ints] = field(default_factory=dict)
    # of each verified token given its prefix, by depth: [VOCAB**depth, VOCAB]
    verified: dict[Group, list[Ints]] = field(default_factory=dict)
    acceptance: Acceptance | None = None  # None: theory has no closed form for it
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    seconds: float = 0.0

    @property
    def samples(self) -> int:
        return sum(int(counts.sum()) for counts in self.counts.values())


class Pairs:
    """A tiny target with all its drafters, as engines and as the library's models."""

    def __init__(
        self,
        directory: Path,
        config: PreTrainedConfig | None = None,
        *,
        pages: int = PAGES,
        page_size: int = PAGE_SIZE,
        logit_divisor: float = LOGIT_DIVISOR,
    ) -> None:
        """Make the pairs of a tiny Llama, or of another config."""
        peaked = checkpoints.write(
            config or LlamaConfig(**SIZES, **TOKENS), directory / "peaked", seed=3
        )
        target = rewrite_checkpoint(peaked, directory / "target", logit_divisor=logit_divisor)
        draft = checkpoints.perturb(target, directory / "draft", NOISE)
        drafts = {
            vocab: rewrite_checkpoint(draft, directory / f"draft {vocab}", rows=rows)
            for vocab, rows in ROWS.items()
        }
        self.engines = {
            name: Engine(
                target,
                drafts[kind.vocab],
                pages=pages,
                draft_pages=pages * kind.pages // PAGES,
                support=kind.support,
                ahead=kind.ahead,
                page_size=page_size,
                translation=kind.translation,
            )
            for name, kind in DRAFTERS.items()
        }
        self.engines["none"] = Engine(target, pages=pages, page_size=page_size)
        self._target = LibraryModel(target, vocab=VOCAB)
        self._drafts = {
            vocab: TranslatedModel(draft, make_translation(), vocab=VOCAB)
            if vocab == "other"
            else LibraryModel(draft, vocab=VOCAB)
            for vocab, draft in drafts.items()
        }
        self.cache_distributions()

    def cache_distributions(self) -> None:
        """Compute each distribution once."""
        self.p, self.q, self.joint = cache(self._p), cache(self._q), cache(self._joint)
        self.lenient, self.score = cache(self._lenient), cache(self._score)

    def _p(self, group: Group) -> Conditionals:
        return self._target.conditionals(group.prompt, COUNTED, group.warp)

    def _q(self, group: Group, drafter: str) -> Conditionals:
        kind = ALL_SHARED if drafter == "all shared" else DRAFTERS[drafter]
        return on_support(
            self._drafts[kind.vocab].conditionals(group.prompt, COUNTED, group.warp),
            kind.support,
            VOCAB,
        )

    def _joint(self, group: Group) -> Floats:
        return self.p(group).joint()

    def full_support_drafter(self, drafter: str) -> str:
        """Return the drafter that draws from the same distribution without truncation to a support.

        Coupled drafts are drawn from all ids that the drafter knows, since their q is not needed.
        """
        if drafter not in DRAFTERS:
            return drafter
        return {VOCAB: "full", "other": "all shared"}.get(DRAFTERS[drafter].vocab, drafter)

    def _lenient(self, group: Group, drafter: str, lenience: float) -> Conditionals:
        q = self.q(group, "full" if drafter == "none" else drafter)
        return lenient(self.p(group), q, lenience)

    def _score(self, group: Group, drafter: str) -> Floats:
        return self.p(group).score_towards(self.lenient(group, drafter, DIRECTION))

    def fit(self, *results: Result) -> Fit:
        """Compare the results with the exact distributions, adding up the counts of a group."""
        fit, total = Fit(), dict[Group, Ints]()
        for result in results:
            for group, counts in result.counts.items():
                total[group] = total.get(group, 0) + counts
        for group, counts in total.items():
            fit.add(counts, self.joint(group))
        return fit

    def fit_lenient(self, result: Result) -> Fit:
        """Compare the verified tokens of a `lenient` result with their own exact distribution.

        Each is compared given its prefix, since other tokens, such as the first, have no draft.
        """
        fit, case = Fit(), result.case
        for group, of_depths in result.verified.items():
            exact = self.lenient(group, case.drafter, case.lenience)
            for counts, rows in zip(of_depths, exact.rows, strict=True):
                for prefix in np.flatnonzero(counts.sum(1)):
                    fit.add(counts[prefix], rows[prefix])
        return fit

    def score_test(self, *results: Result) -> ScoreTest:
        """Test for a deviation from p in the direction of a lenient verifier: towards q."""
        test = ScoreTest()
        for result in results:
            for group, counts in result.counts.items():
                if group.warp.temperature:
                    score = self.score(group, result.case.drafter)
                    test.add(counts, self.joint(group), score)
        return test


def is_flagged(pairs: Pairs, result: Result) -> bool:
    """Return whether either test rejects that the samples are the target's."""
    return min(pairs.fit(result).p_value, pairs.score_test(result).p_value) < LEAST_P


def control(
    pairs: Pairs, case: Case, number: int, *, samples: int, lenience: float = CONTROL_LENIENCE
) -> Result:
    """Sample a case whose verifier accepts too much, with seeds of its own."""
    lossy = replace(case, verifier="lenient", lenience=lenience)
    return sample(pairs, lossy, samples=samples, first_seed=CONTROL_SEED + (number << 32))


def rewrite_checkpoint(
    directory: Path,
    out: Path,
    *,
    rows: Sequence[int] = range(VOCAB),
    logit_divisor: float = 1.0,
) -> Path:
    """Write a copy whose ids are these of the original, and whose logits are divided."""
    out.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "vocab_size": len(rows)}))
    weights = load_file(directory / "model.safetensors")
    for name in {"model.embed_tokens.weight", "shared.weight", "lm_head.weight"} & set(weights):
        weights[name] = weights[name][list(rows)].contiguous()
    weights["lm_head.weight"] /= logit_divisor
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def sample(pairs: Pairs, case: Case, *, samples: int, first_seed: int) -> Result:
    """Sample continuations through a whole engine, in batches, and count them.

    No two requests of a proof have the same seed.
    """
    began = time.perf_counter()
    result = Result(case, acceptance=Acceptance() if _rule(case) else None)
    for start in range(0, samples, AT_ONCE):
        seeds = range(first_seed + start, first_seed + min(start + AT_ONCE, samples))
        requests = [_request(case, i, seed) for i, seed in enumerate(seeds)]
        run = pairs.engines[case.drafter].run(
            requests,
            pacer=RandomPacer(max_gamma=MAX_GAMMA, seed=first_seed + start)
            if case.gamma is None
            else None,
            gamma=case.gamma,
            max_gamma=case.largest_gamma,
            max_running=RUNNING,
            max_queued=AT_ONCE,
            max_batch_tokens=BATCH_TOKENS,
            lenience=case.lenience,
        )
        _count_continuations(pairs, result, requests, run.answers)
        result.drafted, result.accepted = (
            result.drafted + run.drafted,
            result.accepted + run.accepted,
        )
        result.preempted += run.num_preempted
    result.seconds = time.perf_counter() - began
    return result


def _request(case: Case, i: int, seed: int) -> Request:
    """Return the i-th request: every batch mixes prompts, warps and verifiers.

    A seeded request gets `coupled` without naming it.
    """
    groups = _groups(case.warps)
    group = groups[i % len(groups)]
    verifier = (
        VERIFIERS[i // len(groups) % len(VERIFIERS)] if case.verifier == "each" else case.verifier
    )
    seeded = verifier == "coupled"
    max_tokens = COUNTED + case.largest_gamma + TAIL
    speculation = Speculation(verifier=None if seeded else verifier)
    return Request(
        group.prompt,
        max_tokens,
        group.warp,
        seed,
        seeded=seeded,
        ignore_eos=True,
        speculation=speculation,
    )


def _groups(warps: str) -> list[Group]:
    return [Group(prompt, warp) for warp in WARPS[warps] for prompt in PROMPTS]


def coupled_texts(pairs: Pairs, group: Group, seeds: Ints) -> Ints:
    """Return each seed's continuation, as its lexicographic number among all of them."""
    texts = np.zeros(len(seeds), dtype=np.int64)
    for depth, rows in enumerate(pairs.p(group).rows):
        keys = row_keys(seeds.astype(np.uint64), [0], [len(group.prompt) + depth], Purpose.COUPLED)
        tokens = draw(torch.from_numpy(rows[texts]).float(), exponential(keys, torch.arange(VOCAB)))
        texts = texts * VOCAB + tokens.numpy()
    return texts


def _count_continuations(
    pairs: Pairs, result: Result, requests: Sequence[Request], answers: Sequence[Answer]
) -> None:
    assert all(len(answer.tokens) == requests[0].max_tokens for answer in answers)
    tokens = np.array([answer.tokens[:COUNTED] for answer in answers])
    origins = np.array([answer.origins[:COUNTED] for answer in answers])
    groups = _groups(result.case.warps)
    for first, group in enumerate(groups):
        codes = np.array(list(_codes(tokens[first :: len(groups)])))  # [COUNTED + 1, samples]
        counts = np.bincount(codes[COUNTED], minlength=VOCAB**COUNTED)
        result.counts[group] = result.counts.get(group, 0) + counts
        _count_verified(result, group, codes, origins[first :: len(groups)])
        if result.acceptance is not None:
            _count_accepted(pairs, result, group, codes, origins[first :: len(groups)])


def _count_verified(result: Result, group: Group, codes: Ints, origins: NDArray[np.str_]) -> None:
    """Count the accepted draft tokens and the corrections, each given its prefix."""
    verified = result.verified.setdefault(
        group, [np.zeros((VOCAB**depth, VOCAB), dtype=np.int64) for depth in range(COUNTED)]
    )
    for depth, counts in enumerate(verified):
        decided = np.isin(origins[:, depth], [Origin.ACCEPTED, Origin.CORRECTION])
        counts += np.bincount(codes[depth + 1, decided], minlength=counts.size).reshape(-1, VOCAB)


def _codes(tokens: Ints) -> Iterator[Ints]:
    """Yield for each depth the prefix's lexicographic number among all prefixes of its length."""
    code = np.zeros(len(tokens), dtype=np.int64)
    yield code
    for column in tokens.T:
        code = code * VOCAB + column
        yield code


def _count_accepted(
    pairs: Pairs, result: Result, group: Group, codes: Ints, origins: NDArray[np.str_]
) -> None:
    """Count the acceptance of the tokens that begin a round.

    Only these are verified given their prefix alone. They are those after a token that was not an
    accepted draft token.
    """
    rule = _rule(result.case)
    assert rule is not None
    assert result.acceptance is not None
    p, q = (
        pairs.p(group),
        pairs.q(
            group,
            pairs.full_support_drafter(result.case.drafter)
            if rule is agreement
            else result.case.drafter,
        ),
    )
    for depth in range(COUNTED):
        begins = origins[:, depth] != Origin.PLAIN
        if depth:
            begins &= origins[:, depth - 1] != Origin.ACCEPTED
        beta = rule(p.rows[depth], q.rows[depth])
        result.acceptance.add(origins[begins, depth] == Origin.ACCEPTED, beta[codes[depth, begins]])


def _rule(case: Case) -> Callable[[Floats, Floats], Floats] | None:
    """Return the formula for the acceptance of a round's first draft token, given p and q.

    Under `block` it depends on later draft tokens too, unless gamma is 1; then there is no formula.
    Neither is there where q depends on what was prepared for, on a lenience within the drafter, on
    how many masks follow in its pass, or on the text having repeated itself.
    """
    if (
        case.drafter in ("none", "eagle ahead", "eagle with copies", "cascade ahead")
        or "l = " in case.drafter
        or (case.drafter in ("dflash", "dspark") and case.gamma != 1)
        or case.warps != "T = 1"
        or not case.is_lossless
    ):
        return None
    rules = {"speculative": overlap, "lenient": overlap, "coupled": agreement}
    return overlap if case.verifier == "block" and case.gamma == 1 else rules.get(case.verifier)
