"""Greedy texts under token rules equal the library's texts with its logits processors.

They do so with any drafts, rejections and preemption, and when a request is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import logits_process as hf

from specserve.types import VERIFIERS, FinishReason, Request, Speculation, TokenRule, Warp
from tests.support import checkpoints
from tests.support.engines import Engine, RandomPacer, greedy, library_greedy

MAX_TOKENS = 24
LENGTHS = (5, 17, 48, 100, 129, 30)
FEW_PAGES = 13


@dataclass(frozen=True, slots=True)
class Ruled:
    """Checkpoints, requests under rules that change their texts, and the library's texts."""

    target: Path
    draft: Path
    requests: list[Request]
    plain: list[tuple[int, ...]]
    texts: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def ruled(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Ruled:
    root = tmp_path_factory.mktemp("ruled")
    target = checkpoints.make("llama", root / "llama")
    draft = checkpoints.perturb(target, root / "draft", 0.05)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, checkpoints.VOCAB, length).tolist()) for length in LENGTHS]
    plain = library_greedy(target, prompts, max_tokens=MAX_TOKENS)
    rules = [_rule(i, text) for i, text in enumerate(plain)]
    requests = [
        replace(
            request,
            warp=Warp(temperature=0, rule=rule),
            stop_token_ids=frozenset(rule.end_ids),
            speculation=Speculation(verifier=VERIFIERS[i % len(VERIFIERS)]),
        )
        for i, (request, rule) in enumerate(
            zip(greedy(prompts, max_tokens=MAX_TOKENS), rules, strict=True)
        )
    ]
    return Ruled(target, draft, requests, plain, library_texts(target, requests))


def _rule(i: int, text: tuple[int, ...]) -> TokenRule:
    """Return a rule that the plain text breaks."""
    words = ((text[4],), text[7:9], text[0:3])
    every_third = tuple(range(i, checkpoints.VOCAB, 3))
    return (
        TokenRule(min_tokens=10, end_ids=(text[3],)),
        TokenRule(bad_words=words),
        TokenRule(allowed_ids=every_third),
        TokenRule(12, (text[2], text[5]), words),
        TokenRule(6, (every_third[5],), ((every_third[9],),), every_third),
        TokenRule(bad_words=tuple((one, other) for one in text for other in text)),
    )[i]


def library_texts(target: Path, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    )
    end_id = model.generation_config.eos_token_id
    return [_library_text(model, request, end_id) for request in requests]


def _library_text(model: Any, request: Request, end_id: int) -> tuple[int, ...]:
    rule, ids = request.warp.rule, torch.tensor([request.prompt])
    assert rule is not None
    ends = [end_id, *rule.end_ids]
    allowed = list(rule.allowed_ids) or list(range(checkpoints.VOCAB))
    processors: list[hf.LogitsProcessor] = [
        hf.PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1),
        hf.MinNewTokensLengthLogitsProcessor(
            len(request.prompt), rule.min_tokens, torch.tensor(ends)
        ),
    ]
    if rule.bad_words:
        processors.append(hf.NoBadWordsLogitsProcessor([list(word) for word in rule.bad_words]))
    text = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=ends,
        logits_processor=hf.LogitsProcessorList(processors),
    )
    return tuple(text[0, ids.shape[1] :].tolist())


def test_each_rule_changes_its_text(ruled: Ruled) -> None:
    """Texts that a rule leaves as they are would hide mistakes."""
    assert all(text != plain for text, plain in zip(ruled.texts, ruled.plain, strict=True))
    assert len({len(text) for text in ruled.texts}) > 1, "end tokens end some text"


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_texts_are_the_library_s_at_any_gamma(ruled: Ruled, gamma: int) -> None:
    run = Engine(ruled.target, ruled.draft).run(ruled.requests, gamma=gamma)
    assert run.texts == ruled.texts
    assert 0 < run.accepted < run.drafted or gamma == 0


def test_texts_are_the_library_s_with_anticipation_and_when_pages_run_out(ruled: Ruled) -> None:
    engine = Engine(
        ruled.target, ruled.draft, pages=FEW_PAGES, draft_pages=2 * FEW_PAGES, ahead=True
    )
    run = engine.run(3 * ruled.requests, pacer=RandomPacer(max_gamma=4), max_gamma=4)
    assert run.texts == 3 * ruled.texts
    assert run.num_preempted > 0
    assert 0 < run.accepted < run.drafted


def test_a_resumed_request_goes_on_under_its_rule(ruled: Ruled) -> None:
    engine = Engine(ruled.target, ruled.draft)
    for num_received in (1, 4, 9):
        resumed = [
            (replace(request, generated=text[:num_received]), text)
            for request, text in zip(ruled.requests, ruled.texts, strict=True)
            if len(text) > num_received
        ]
        run = engine.run([request for request, _ in resumed], gamma=3)
        assert run.texts == [text[num_received:] for _, text in resumed]


def test_a_draft_under_the_same_rule_proposes_only_what_the_target_writes(ruled: Ruled) -> None:
    """Draft with the target itself: were its drafts under no rule, some would be rejected."""
    requests = [
        replace(request, ignore_eos=True, stop_token_ids=frozenset()) for request in ruled.requests
    ]
    run = Engine(ruled.target, ruled.target).run(requests, gamma=3)
    assert run.accepted == run.drafted > 0
    assert all(answer.finish is FinishReason.LENGTH for answer in run.answers)
