"""Greedy and seeded texts are the same, token for token, in bf16.

They do not depend on drafter, gamma, the other sequences of the batch, or preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from specserve.types import VERIFIERS, Request, Speculation, Warp
from tests.support import checkpoints
from tests.support.engines import Engine, RandomPacer, Run

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 20, 31, 32, 33, 40, 47, 48, 64, 70)  # around pages
MAX_TOKENS = 24
MAX_GAMMA = 5
ENOUGH, FEW = 200, 20  # pages; the longest text alone takes 6
# As in every released model: widths of whole vectors, and no product so small that torch would use
# its own loops instead of oneDNN.
WIDTHS = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128}
WARPS = (
    Warp(temperature=0),
    Warp(),
    Warp(temperature=0),
    Warp(temperature=0.8, top_k=40, top_p=0.9),
    Warp(temperature=0, repetition_penalty=1.2),
    Warp(temperature=1.2, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.2),
)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    target: Path
    drafts: dict[str, Path]


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines for each drafter, with enough pages and with few."""

    enough: dict[str, Engine]
    few: dict[str, Engine]
    ahead: dict[int | None, Engine]  # with anticipation, by fanout; None: as many as pay
    plain: list[tuple[int, ...]]  # every request alone, nothing drafted


# through the fused network, and through the library's code with windows and softcap
@pytest.fixture(scope="module", params=["llama", "gemma2"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    written = make_checkpoints(request.param, tmp_path_factory.mktemp("same_text"))
    enough, few = opened(written, pages=ENOUGH), opened(written, pages=FEW)
    plain = enough["close"].run(requests(), drafts=False, max_running=1).texts
    return Engines(
        enough, few, {fanout: opened_ahead(written, fanout) for fanout in (1, 4, None)}, plain
    )


def make_checkpoints(name: str, root: Path) -> Checkpoints:
    config = checkpoints.CONFIGS[name]()
    for width, value in WIDTHS.items():
        setattr(config, width, value)
    target = checkpoints.write(config, root / "target")
    close = checkpoints.perturb(target, root / "close", 0.05)
    unrelated = checkpoints.write(config, root / "unrelated", seed=7)
    return Checkpoints(target, {"close": close, "top 3": close, "unrelated": unrelated})


def opened(written: Checkpoints, *, pages: int) -> dict[str, Engine]:
    return {
        name: Engine(
            written.target,
            draft,
            pages=pages,
            dtype="bfloat16",
            support=3 if name == "top 3" else 64,
        )
        for name, draft in written.drafts.items()
    }


def opened_ahead(written: Checkpoints, fanout: int | None) -> Engine:
    return Engine(
        written.target,
        written.drafts["close"],
        pages=ENOUGH,
        draft_pages=4 * ENOUGH,
        dtype="bfloat16",
        ahead=True,
        fanout=fanout,
    )


def requests() -> list[Request]:
    """Return greedy requests under every verifier and seeded requests, in turn."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(3, checkpoints.VOCAB, length).tolist()) for length in LENGTHS]
    warps = [WARPS[i % len(WARPS)] for i in range(len(prompts))]
    return [
        _request(prompt, warp, VERIFIERS[i % 4], seed=i)
        for i, (prompt, warp) in enumerate(zip(prompts, warps, strict=True))
    ]


def _request(prompt: tuple[int, ...], warp: Warp, verifier: str, *, seed: int) -> Request:
    greedy = warp.temperature == 0
    speculation = Speculation(verifier=verifier if greedy else None)
    return Request(
        prompt, MAX_TOKENS, warp, seed, seeded=not greedy, ignore_eos=True, speculation=speculation
    )


def run(engine: Engine, gamma: int | None, *, running: int) -> Run:
    """Run with chunked prompts; gamma None is another gamma for each sequence in each round."""
    pacer = RandomPacer(max_gamma=MAX_GAMMA, seed=running) if gamma is None else None
    max_gamma = MAX_GAMMA if gamma is None else gamma
    return engine.run(
        requests(),
        pacer=pacer,
        gamma=gamma,
        max_gamma=max_gamma,
        max_running=running,
        max_batch_tokens=48,
    )


def differing(texts: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> list[int]:
    return [i for i, (text, other) in enumerate(zip(texts, others, strict=True)) if text != other]


def test_the_texts_are_long_and_varied(engines: Engines) -> None:
    assert all(len(text) == MAX_TOKENS for text in engines.plain)
    assert len({token for text in engines.plain for token in text}) > 50


@pytest.mark.parametrize(
    ("drafter", "gamma", "running"),
    [
        ("close", 4, 1),
        *(
            (drafter, gamma, running)
            for drafter in ("close", "top 3", "unrelated")
            for gamma, running in ((1, 16), (5, 16), (None, 3))
        ),
    ],
)
def test_drafts_change_no_token(
    engines: Engines, drafter: str, gamma: int | None, running: int
) -> None:
    answer = run(engines.enough[drafter], gamma, running=running)
    assert differing(answer.texts, engines.plain) == []
    assert answer.drafted > answer.accepted
    assert answer.accepted > 0 or drafter == "unrelated"


@pytest.mark.parametrize("running", [3, 16])
def test_other_sequences_in_the_batch_change_no_token(engines: Engines, running: int) -> None:
    assert differing(run(engines.enough["close"], 0, running=running).texts, engines.plain) == []


@pytest.mark.parametrize(
    ("drafter", "gamma"),
    [("close", 0), ("close", 2), ("close", None), ("top 3", 1), ("unrelated", None)],
)
def test_preemption_changes_no_token(engines: Engines, drafter: str, gamma: int | None) -> None:
    answer = run(engines.few[drafter], gamma, running=16)
    assert answer.num_preempted > 0
    assert differing(answer.texts, engines.plain) == []


def test_another_seed_is_another_text(engines: Engines) -> None:
    others = [
        Request(
            r.prompt,
            r.max_tokens,
            r.warp,
            r.seed + 100,
            seeded=r.seeded,
            ignore_eos=True,
            speculation=r.speculation,
        )
        for r in requests()
    ]
    texts = engines.enough["close"].run(others, gamma=4, max_running=16).texts
    assert differing(texts, engines.plain) == [
        i for i, request in enumerate(others) if request.seeded
    ]


@pytest.mark.parametrize("fanout", [1, 4, None])
@pytest.mark.parametrize(("gamma", "running"), [(1, 16), (5, 3), (None, 16)])
def test_anticipation_changes_no_token_with_any_fanout_and_any_gamma(
    engines: Engines, fanout: int | None, gamma: int | None, running: int
) -> None:
    engine = engines.ahead[fanout]
    answer = run(engine, gamma, running=running)
    assert differing(answer.texts, engines.plain) == []
    assert engine.ahead is not None
    assert engine.ahead.anticipation.num_hits > 0
