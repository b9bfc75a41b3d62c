"""The target's side of a round: verdicts, logprobs and penalties equal plain decoding's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve.models.model import ModelOptions, open_model
from specserve.models.target import TargetModel
from specserve.sampling import row_draws, verify
from specserve.sampling.row_draws import draw_from_rows
from specserve.types import ModelInfo, Policy, Verdict, VerifyStep, Warp
from tests.support import checkpoints

PROMPT = tuple(range(20, 60))
INFO = ModelInfo(checkpoints.VOCAB, checkpoints.CONTEXT, frozenset(), 16, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("target") / "target")


def open_target_model(checkpoint: Path) -> TargetModel:
    return TargetModel(
        open_model(checkpoint, ModelOptions(dtype="float32", device="cpu", pages=64)).runner, INFO
    )


def policy(logprobs: int | None = None, **warp: Any) -> Policy:
    return Policy(Warp(**{"temperature": 0.0, **warp}), "block", 1, len(PROMPT), logprobs=logprobs)


def decode_plainly(model: TargetModel, num_tokens: int, own_policy: Policy) -> list[Verdict]:
    """Return the verdicts of plain decoding, token by token without draft tokens."""
    verdicts: list[Verdict] = []
    start, tokens = 0, PROMPT
    for _ in range(num_tokens):
        verdicts += model.verify([VerifyStep(0, start, tokens, (), None, own_policy)])
        start, tokens = start + len(tokens), (verdicts[-1].next_token,)
    model.release([0])
    return verdicts


def test_logprobs_are_the_targets_for_accepted_tokens_and_for_corrections(checkpoint: Path) -> None:
    own_policy = policy(logprobs=3)
    expected = decode_plainly(open_target_model(checkpoint), 5, own_policy)
    drafts = (
        *(v.next_token for v in expected[:3]),
        (expected[3].next_token + 1) % checkpoints.VOCAB,
        7,
    )
    (verdict,) = open_target_model(checkpoint).verify(
        [VerifyStep(0, 0, PROMPT, drafts, None, own_policy)]
    )
    assert (verdict.accepted, verdict.next_token) == (3, expected[3].next_token)
    assert verdict.logprobs is not None
    for got, want in zip(verdict.logprobs, expected, strict=False):
        assert want.logprobs is not None
        assert got.top_ids == want.logprobs[0].top_ids
        assert got.token == pytest.approx(want.logprobs[0].token, abs=1e-4)


def test_logprobs_are_of_the_unwarped_distribution(checkpoint: Path) -> None:
    library = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        raw = library(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    (verdict,) = open_target_model(checkpoint).verify(
        [VerifyStep(0, 0, PROMPT, (), None, policy(logprobs=2, temperature=0.5, top_k=1))]
    )
    assert verdict.logprobs is not None
    assert verdict.logprobs[0].token == pytest.approx(raw[verdict.next_token].item(), abs=1e-4)
    assert verdict.logprobs[0].top == pytest.approx(raw.topk(2).values.tolist(), abs=1e-4)


def test_penalties_see_the_drafts_before_each_position(checkpoint: Path) -> None:
    own_policy = policy(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
    expected = [v.next_token for v in decode_plainly(open_target_model(checkpoint), 8, own_policy)]
    assert expected != [
        v.next_token for v in decode_plainly(open_target_model(checkpoint), 8, policy())
    ]
    (verdict,) = open_target_model(checkpoint).verify(
        [VerifyStep(0, 0, PROMPT, tuple(expected[:7]), None, own_policy)]
    )
    assert (verdict.accepted, verdict.next_token) == (7, expected[7])


def test_a_sequence_without_drafts_draws_from_the_same_bits_beside_one_with_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[torch.Tensor] = []

    def draw(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        drawn.append(weights)
        return draw_from_rows(weights, keys)

    for module in (row_draws, verify):
        monkeypatch.setattr(module, "draw_from_rows", draw)
    plain = VerifyStep(0, 0, PROMPT, (), None, policy(temperature=0.7))
    drafted = VerifyStep(1, 0, PROMPT[5:], (7, 8), None, policy(temperature=0.7))
    (alone,) = open_target_model(checkpoint).verify([plain])
    beside, _ = open_target_model(checkpoint).verify([plain, drafted])
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert alone == beside


def test_a_repeated_step_gives_the_same_verdict(checkpoint: Path) -> None:
    model = open_target_model(checkpoint)
    model.verify([VerifyStep(0, 0, PROMPT, (), None, policy())])
    step = VerifyStep(0, len(PROMPT), (5,), (6, 7, 8), None, policy())
    assert model.verify([step]) == model.verify([step])


def test_chunks_of_a_prompt_get_no_verdict_and_leave_the_same_text(checkpoint: Path) -> None:
    whole = open_target_model(checkpoint).verify([VerifyStep(0, 0, PROMPT, (), None, policy())])
    model = open_target_model(checkpoint)
    assert (
        model.verify([VerifyStep(0, 0, PROMPT[:17], (), None, policy(), needs_verdict=False)]) == []
    )
    assert model.verify([VerifyStep(0, 17, PROMPT[17:], (), None, policy())]) == whole


def test_the_pages_of_a_prompt_are_found_in_the_next_pass_even_if_its_sequence_has_ended(
    checkpoint: Path,
) -> None:
    model = open_target_model(checkpoint)
    (first,) = model.verify([VerifyStep(0, 0, PROMPT, (7, 8, 9), None, policy())])
    model.release([0])
    (second,) = model.verify([VerifyStep(1, 0, PROMPT, (7, 8, 9), None, policy())])
    assert model.runner.cache.prefix_hits == 32
    assert (second.accepted, second.next_token) == (first.accepted, first.next_token)
    model.release([1])
    model.runner.cache.check()


def test_what_the_prefix_cache_had_is_reported_with_the_first_decision(checkpoint: Path) -> None:
    model, prompt = open_target_model(checkpoint), PROMPT * 2
    whole = VerifyStep(0, 0, prompt, (), None, policy())
    chunk = replace(whole, seq_id=1, tokens=prompt[:48], needs_verdict=False)
    rest = replace(whole, seq_id=1, start=48, tokens=prompt[48:])
    steps = [
        whole,
        chunk,
        chunk,
        rest,
        replace(whole, seq_id=1, start=80, tokens=(5,)),
        replace(whole, seq_id=2),
        replace(whole, seq_id=2),
    ]
    found = [[verdict.cached_tokens for verdict in model.verify([step])] for step in steps]
    assert found == [[0], [], [], [48], [0], [64], [64]], "a step that is repeated counts once"
    model.verify([replace(chunk, seq_id=3)])
    model.release([3])
    assert model.runner.cache.unreported_hits == {}


def test_draft_tokens_behind_a_prompt_are_not_found_in_the_prefix_cache(checkpoint: Path) -> None:
    model = open_target_model(checkpoint)
    drafts = tuple(range(8))
    model.verify([VerifyStep(0, 0, PROMPT, drafts, None, policy())])
    model.verify([VerifyStep(1, 0, PROMPT + drafts, (), None, policy())])
    assert model.runner.cache.prefix_hits == 32


def test_a_known_prompt_is_taken_from_the_prefix_cache_with_the_same_verdict(
    checkpoint: Path,
) -> None:
    model = open_target_model(checkpoint)
    drafts = tuple(v.next_token for v in decode_plainly(model, 4, policy()))
    model.verify([VerifyStep(1, 0, PROMPT, (), None, policy())])
    model.verify([VerifyStep(1, len(PROMPT), (drafts[0],), (), None, policy())])
    (verdict,) = model.verify([VerifyStep(2, 0, PROMPT, drafts[:3], None, policy())])
    assert model.runner.cache.prefix_hits >= 32
    assert (verdict.accepted, verdict.next_token) == (3, drafts[3])


def test_a_prompt_is_found_under_its_own_salt_only_with_the_same_verdict(checkpoint: Path) -> None:
    model = open_target_model(checkpoint)
    next_tokens, hits = set(), []
    for seq_id, salt in enumerate((b"alice", b"bob", b"", b"alice")):
        own_policy = replace(policy(), cache_salt=salt)
        (verdict,) = model.verify([VerifyStep(seq_id, 0, PROMPT, (), None, own_policy)])
        next_tokens.add(verdict.next_token)
        hits.append(model.runner.cache.prefix_hits)
        model.runner.cache.check()
    assert hits == [0, 0, 0, 32]
    assert len(next_tokens) == 1
