"""Whatever drafts without a model, a whole engine writes what its target would: sampled, greedy, and with shared noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specserve.drafters.ngram.build import KINDS, open_statistical
from specserve.drafters.ngram.drafter import StatisticalDrafter
from specserve.drafters.ngram.tables import (
    FILE,
    Bigram,
    Counts,
    Table,
    Uniform,
    Unigram,
    count,
    save,
)
from specserve.types import Request, Speculation
from tests.support.continuations import (
    COUNTED,
    DRAFTERS,
    PAGES,
    VOCAB,
    Case,
    Group,
    Kind,
    Pairs,
    Result,
    sample,
)
from tests.support.engines import GREEDY, Engine, RandomPacer
from tests.support.exact_distribution import Conditionals, Floats, texts_of

SAMPLES = 1500  # of each case
SEED = 1 << 41
TABLED = ("unigram", "bigram", "max_gram")
ASKED = 8  # requests with the same seeds, drafted for by each kind


class Statistical(Engine):
    """An engine whose drafter has no pages to check."""

    def __init__(self, target: Path, drafter: StatisticalDrafter) -> None:
        super().__init__(target, pages=PAGES)
        self.drafter = drafter  # type: ignore[assignment]

    def check_idle(self) -> None:
        cache = self.target.runner.cache
        cache.check()
        assert cache.num_used == 0
        assert isinstance(self.drafter, StatisticalDrafter)
        assert self.drafter._followed == {}


class Counted(Pairs):
    """The pairs of the other proofs, with every statistical drafter. Tables are counted from what the target's prompts look like."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        save(self.counts, directory / FILE)
        for name in KINDS:
            path = directory if name in TABLED else None
            self.engines[name] = Statistical(
                directory / "target",
                open_statistical(name, path=path, learn=None, support=64, vocab_size=VOCAB),
            )
        learnt = open_statistical("bigram", path=None, learn=True, support=3, vocab_size=VOCAB)
        self.engines["learnt"] = Statistical(directory / "target", learnt)

    @property
    def counts(self) -> Counts:
        """Every token is followed by every other now and then."""
        rng = np.random.default_rng(5)
        rows = rng.dirichlet(np.full(VOCAB, 2.0), VOCAB)
        text = [0]
        for _ in range(4000):
            text.append(int(rng.choice(VOCAB, p=rows[text[-1]])))
        return count([text], keep=VOCAB)

    def _q(self, group: Group, drafter: str) -> Conditionals:
        tables: dict[str, Table] = {
            "unigram": Unigram(self.counts, width=VOCAB),
            "bigram": Bigram(self.counts, width=VOCAB),
            "random": Uniform(vocab_size=VOCAB, width=VOCAB),
        }
        texts = [texts_of(group.prompt, depth, VOCAB) for depth in range(COUNTED)]
        return Conditionals(
            tuple(np.array([stated(tables[drafter], text) for text in depth]) for depth in texts)
        )


def stated(table: Table, text: np.ndarray) -> Floats:
    row = table.row(int(text[-1]), len(text))
    assert row is not None
    return np.bincount(row.ids, row.probs.astype(np.float64), minlength=VOCAB)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return Counted(tmp_path_factory.mktemp("statistical"))


CASES = (
    Case("speculative", "bigram", 2),
    Case("speculative", "unigram", 1),
    Case("speculative", "random", 2),
    Case("coupled", "bigram", 3),
    Case("block", "bigram", 4),
    Case("block", "learnt", 3),
    Case("each", "learnt", None, "mixed"),
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
    pairs: Counted, case: Case
) -> None:
    result: Result = sample(
        pairs, case, samples=SAMPLES, first_seed=SEED + CASES.index(case) * SAMPLES
    )
    assert result.drafted > result.accepted > 0
    fit = pairs.fit(result)
    assert fit.dof > 30
    assert fit.p_value > 1e-3
    if result.acceptance is not None:
        assert abs(result.acceptance.errors_off) < 3


def test_a_q_that_is_not_what_was_drawn_from_is_caught(
    pairs: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test, had the drafter drawn from its rows and stated them flatter."""
    drafter = pairs.engines["bigram"].drafter
    draft = drafter.draft  # type: ignore[union-attr]

    def flattened(steps, enough):  # type: ignore[no-untyped-def]
        for proposal in draft(steps, enough):
            if proposal.q is not None:
                even = np.full_like(proposal.q.probs, 1 / proposal.q.probs.shape[1])
                yield replace(proposal, q=replace(proposal.q, probs=even))
            else:
                yield proposal

    monkeypatch.setattr(drafter, "draft", lambda steps, enough: list(flattened(steps, enough)))
    assert (
        pairs.fit(
            sample(pairs, Case("speculative", "bigram", 4), samples=SAMPLES, first_seed=SEED)
        ).p_value
        < 1e-6
    )


@pytest.mark.parametrize("way", ["greedy", "coupled"])
def test_the_text_is_the_same_whatever_drafts_and_however_much(pairs: Counted, way: str) -> None:
    prompts = [tuple((3 * i + j * j) % VOCAB for j in range(5 + i)) for i in range(ASKED)]
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
    for name in (*KINDS, "learnt"):
        for pacer in (None, RandomPacer(max_gamma=6, seed=1)):
            run = pairs.engines[name].run(
                requests, pacer=pacer, gamma=None if pacer else 4, max_gamma=6
            )
            assert run.texts == plain, name
            accepted[name] = run.accepted
    assert all(accepted.values())


def test_the_kinds_are_those_of_the_other_proofs_plus_these() -> None:
    assert not set(KINDS) & set(DRAFTERS)
    assert Kind().vocab == VOCAB
