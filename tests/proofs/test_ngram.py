"""N-gram drafters leave an engine's text the target's own: sampled, greedy and coupled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specserve.drafters.ngram.build import KINDS, open_ngram_drafter
from specserve.drafters.ngram.drafter import MIN_MATCH, NgramDrafter
from specserve.drafters.ngram.tables import (
    TABLES_FILE,
    BigramTable,
    Counts,
    Table,
    UniformTable,
    UnigramTable,
    count_texts,
    save_tables,
)
from specserve.types import DraftStep, Proposal, Request, Speculation
from tests.support.continuations import (
    COUNTED,
    DRAFTERS,
    PAGES,
    VOCAB,
    Case,
    DrafterSpec,
    Group,
    Pairs,
    Result,
    control,
    is_flagged,
    sample,
)
from tests.support.engines import GREEDY, Engine, RandomPacer
from tests.support.exact_distribution import Conditionals, Floats, Ints, all_continuations

SAMPLES, CONTROL_SAMPLES = 750, 500
"""Samples of each case, and of its control."""
SEED = 1 << 41
COPYING = ("prompt_copy", "max_gram")
WITH_TABLES = ("unigram", "bigram", "max_gram")
NUM_REQUESTS = 8
"""Requests with the same seeds, for each kind."""


class NgramEngine(Engine):
    """An engine whose drafter has no pages to check."""

    def __init__(self, target: Path, drafter: NgramDrafter) -> None:
        super().__init__(target, pages=PAGES)
        self.drafter = drafter  # type: ignore[assignment]

    def check_idle(self) -> None:
        cache = self.target.runner.cache
        cache.check()
        assert cache.num_used == 0
        assert isinstance(self.drafter, NgramDrafter)
        assert self.drafter._sequences == {}


class NgramPairs(Pairs):
    """The pairs of the other proofs with every n-gram drafter.

    Tables are counted from a text that resembles the target's prompts.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        save_tables(self.counts, directory / TABLES_FILE)
        for name in KINDS:
            path = directory if name in WITH_TABLES else None
            self.engines[name] = NgramEngine(
                directory / "target",
                open_ngram_drafter(name, path=path, learn=None, support=64, vocab_size=VOCAB),
            )
        online = open_ngram_drafter("bigram", path=None, learn=True, support=3, vocab_size=VOCAB)
        assert online._learner is not None
        self._online = online._learner
        self.engines["online"] = NgramEngine(directory / "target", online)

    @property
    def counts(self) -> Counts:
        """Counts of a text in which every token sometimes follows every other."""
        rng = np.random.default_rng(5)
        rows = rng.dirichlet(np.full(VOCAB, 2.0), VOCAB)
        text = [0]
        for _ in range(4000):
            text.append(int(rng.choice(VOCAB, p=rows[text[-1]])))
        return count_texts([text], keep=VOCAB)

    def _q(self, group: Group, drafter: str) -> Conditionals:
        tables: dict[str, Table] = {
            "unigram": UnigramTable(self.counts, width=VOCAB),
            "bigram": BigramTable(self.counts, width=VOCAB),
            "random": UniformTable(vocab_size=VOCAB, width=VOCAB),
            "online": self._online,  # as it is now, which gives the score its direction
        }
        if drafter in COPYING:
            return Conditionals(tuple(map(_copying, all_texts(group), self.p(group).rows)))
        return Conditionals(
            tuple(
                np.array([stated(tables[drafter], text) for text in texts])
                for texts in all_texts(group)
            )
        )


def all_texts(group: Group) -> list[Ints]:
    """Return the prompt with every continuation, by depth."""
    return [all_continuations(group.prompt, depth, VOCAB) for depth in range(COUNTED)]


def _copying(texts: Ints, p: Floats) -> Floats:
    """Return the token that is copied after each text, as a row of q; p where none is."""
    rows = p.copy()
    for row, text in zip(rows, texts.tolist(), strict=True):
        followers = (
            text[start + size]
            for size in range(len(text) - 1, MIN_MATCH - 1, -1)
            for start in reversed(range(len(text) - size))
            if text[start : start + size] == text[-size:]
        )
        if (copied := next(followers, None)) is not None:
            row[:] = np.eye(VOCAB)[copied]
    return rows


def stated(table: Table, text: np.ndarray) -> Floats:
    row = table.row(int(text[-1]), len(text))
    assert row is not None
    return np.bincount(row.ids, row.probs, minlength=VOCAB).astype(np.float64)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> NgramPairs:
    return NgramPairs(tmp_path_factory.mktemp("ngram"))


CASES = (
    Case("speculative", "bigram", 2),
    Case("speculative", "unigram", 1),
    Case("speculative", "random", 2),
    Case("coupled", "bigram", 3),
    Case("block", "bigram", 4),
    Case("block", "online", 3),
    Case("each", "online", None, "mixed"),
    Case("each", "bigram", None, "mixed"),
    Case("each", "random", None, "truncated"),
    Case("each", "prompt_copy", 3),
    Case("each", "prompt_copy", None, "mixed"),
    Case("each", "max_gram", 3),
    Case("each", "max_gram", None, "mixed"),
)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_continuations_have_the_targets_distribution_and_measured_alpha_is_the_expected(
    pairs: NgramPairs, case: Case
) -> None:
    result: Result = sample(
        pairs, case, samples=SAMPLES, first_seed=SEED + CASES.index(case) * SAMPLES
    )
    assert result.drafted > result.accepted > 0
    fit = pairs.fit(result)
    assert fit.dof > 30
    assert not is_flagged(pairs, result)
    if result.acceptance is not None:
        assert abs(result.acceptance.num_standard_errors) < 3


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.verifier}-{case.drafter}-{case.gamma}-{case.warps}"
)
def test_a_verifier_that_accepts_too_much_is_flagged(pairs: NgramPairs, case: Case) -> None:
    """Accept three times as much; or a quarter, where q is below the truncated p anyway."""
    lenience = 0.25 if (case.drafter, case.warps) == ("random", "truncated") else 3.0
    result = control(pairs, case, CASES.index(case), samples=CONTROL_SAMPLES, lenience=lenience)
    assert is_flagged(pairs, result)


def test_a_q_other_than_the_draft_distribution_is_detected(
    pairs: NgramPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send flatter rows than those that were drawn from: the test must fail."""
    drafter = pairs.engines["bigram"].drafter
    draft = drafter.draft  # type: ignore[union-attr]

    def flattened(
        steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Iterator[Proposal]:
        for proposal in draft(steps, should_stop):
            if proposal.q is not None:
                even = np.full_like(proposal.q.probs, 1 / proposal.q.probs.shape[1])
                yield replace(proposal, q=replace(proposal.q, probs=even))
            else:
                yield proposal

    monkeypatch.setattr(
        drafter, "draft", lambda steps, should_stop: list(flattened(steps, should_stop))
    )
    assert (
        pairs.fit(
            sample(pairs, Case("speculative", "bigram", 4), samples=SAMPLES, first_seed=SEED)
        ).p_value
        < 1e-6
    )


@pytest.mark.parametrize("way", ["greedy", "coupled"])
def test_the_text_is_the_same_whatever_drafts_and_however_much(pairs: NgramPairs, way: str) -> None:
    prompts = [tuple((3 * i + j * j) % VOCAB for j in range(5 + i)) for i in range(NUM_REQUESTS)]
    requests = [
        Request(prompt, 40 - len(prompt), GREEDY, seed, ignore_eos=True)
        for seed, prompt in enumerate(prompts)
    ]
    if way == "coupled":
        requests = [
            replace(request, warp=type(GREEDY)(), seeded=True, speculation=Speculation())
            for request in requests
        ]
    plain = pairs.engines["none"].run(requests, gamma=0).texts
    accepted = {}
    for name in (*KINDS, "online"):
        for pacer in (None, RandomPacer(max_gamma=6, seed=1)):
            run = pairs.engines[name].run(
                requests, pacer=pacer, gamma=None if pacer else 4, max_gamma=6
            )
            assert run.texts == plain, name
            accepted[name] = run.accepted
    assert all(accepted.values())


def test_ngram_kinds_are_not_among_the_drafters_of_the_other_proofs() -> None:
    assert not set(KINDS) & set(DRAFTERS)
    assert DrafterSpec().vocab == VOCAB
