"""Heads: trained, loaded, refused, and drafting after every pass, on tiny checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.torch import load_file

from specserve import LLM, Sampling
from specserve.cli.main import main
from specserve.cluster.engine.remote import PushedProposals, RemoteTarget
from specserve.config.tree import DEMO, config_from_keys
from specserve.drafters.after_verify import DraftAfterVerify
from specserve.errors import ConfigError, ModelError, ModelNotFound
from specserve.features.eagle.heads_drafter import HeadsDrafter
from specserve.models.checkpoints.weights import fingerprint
from specserve.types import DraftStep, Policy, Proposal, Verdict, VerifyStep, Warp
from specserve.wire.messages import PreparedProposals, pack, unpack
from tests.support import checkpoints
from tests.support.engines import load_target, model_options
from tests.support.self_speculative_engines import (
    LLM_KEYS,
    NUM_HEADS,
    TEXT,
    random_heads,
    small_gemma3,
    with_heads,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gemma3(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_heads(
        target,
        tmp_path_factory.mktemp("heads") / "heads",
        hidden_size=64,
        vocab_size=checkpoints.VOCAB,
    )


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"draft.kind": "layer_skip", "draft.path": "somewhere"}, r"draft\.path"),
        ({"draft.kind": "layer_skip", "draft.skip": [1, 1]}, "twice"),
        ({"draft.kind": "layer_skip", "draft.skip": [-1]}, r"draft\.skip"),
        ({"draft.kind": "bigram", "draft.skip": [1]}, r"draft\.skip belongs to"),
        ({"draft.kind": "heads", "target.path": "another"}, r"draft\.path.*specserve heads"),
        ({"draft.kind": "heads", "target.tensor_parallel": 2}, r"target\.tensor_parallel"),
    ],
    ids=["a path", "a layer twice", "a layer below 0", "another kind", "no heads", "two ranks"],
)
def test_keys_that_a_self_speculative_drafter_cannot_use_are_refused(
    keys: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_keys(keys)


def refuse_to_open(*_: object, **__: object) -> None:
    pytest.fail("weights were read before the mistake was found")


def test_mistakes_are_found_before_any_weights_are_read(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.llm.inprocess.open_target", refuse_to_open)
    with pytest.raises(ConfigError, match="0 to 2"):
        LLM(target, **{"draft.kind": "layer_skip", "draft.skip": cast(Any, [3])})
    with pytest.raises(ModelError, match="another target"):
        LLM(target, **{"draft.kind": "heads", "draft.path": str(DEMO / "heads")})
    with pytest.raises(ModelNotFound, match="no heads"):
        LLM(target, **{"draft.kind": "heads", "draft.path": str(tmp_path)})
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(ModelError, match="does not say"):
        LLM(target, **{"draft.kind": "heads", "draft.path": str(tmp_path)})


def test_the_demo_target_has_heads_of_its_own() -> None:
    assert config_from_keys({"draft.kind": "heads"}).draft.path == str(DEMO / "heads")
    assert config_from_keys(
        {"draft.kind": "heads", "target.path": str(DEMO / "target")}
    ).draft.path == str(DEMO / "heads")
    assert sum(file.stat().st_size for file in (DEMO / "heads").iterdir()) < 1.2e6


@pytest.mark.parametrize("kind", ["layer_skip", "heads"])
def test_a_model_run_by_the_librarys_code_writes_its_own_text_with_either_kind(
    target: Path, heads: Path, kind: str
) -> None:
    """Draft for Gemma 3, which is not fused: its hidden state and layers are the library's."""
    keys = {**LLM_KEYS, "draft.kind": kind} | (
        {"draft.path": str(heads)} if kind == "heads" else {"draft.skip": [1]}
    )
    wanted = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(target, **LLM_KEYS | {"draft.kind": "none"}) as plain, LLM(target, **keys) as llm:
        outputs = llm.generate([TEXT, TEXT[:7]], wanted)
        assert [output.token_ids for output in outputs] == [
            output.token_ids for output in plain.generate([TEXT, TEXT[:7]], wanted)
        ]
    assert all(output.stats and output.stats.drafted for output in outputs)


def train_heads(target: Path, out: Path, text: Path, *more: str) -> int:
    return main(
        [
            "heads",
            "--target",
            str(target),
            "--text",
            str(text),
            "--out",
            str(out),
            "--minutes",
            "0.03",
            "--heads",
            "2",
            *more,
        ]
    )


def test_the_command_fits_heads_that_the_engine_takes_for_this_target_alone(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 60)
    assert train_heads(target, tmp_path / "heads", tmp_path / "text", "--threads", "1") == 0
    assert "alpha is 0." in capsys.readouterr().out
    assert any(
        tensor.any() for tensor in load_file(tmp_path / "heads" / "heads.safetensors").values()
    ), "nothing was learned"
    assert json.loads((tmp_path / "heads" / "heads.json").read_text())["num_heads"] == 2
    with LLM(
        target, **LLM_KEYS | {"draft.kind": "heads", "draft.path": str(tmp_path / "heads")}
    ) as llm:
        (output,) = llm.generate([TEXT], Sampling(max_tokens=12, seed=1, ignore_eos=True))
    assert output.stats is not None
    assert output.stats.drafted > 0
    other = checkpoints.perturb(target, tmp_path / "other", 0.1)
    with pytest.raises(ModelError, match="another target"):
        LLM(other, **{"draft.kind": "heads", "draft.path": str(tmp_path / "heads")})


def test_a_text_that_is_too_short_to_fit_to_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a")
    assert train_heads(target, tmp_path / "heads", tmp_path / "text") == 2
    assert "tokens" in capsys.readouterr().err


def test_a_widened_copy_is_the_same_target_to_its_heads(tmp_path: Path) -> None:
    assert (
        main(
            [
                "inflate",
                "--model",
                str(DEMO / "target"),
                "--params",
                "8M",
                "--out",
                str(tmp_path / "wide"),
            ]
        )
        == 0
    )
    assert fingerprint(tmp_path / "wide") == fingerprint(DEMO / "target")


POLICY = Policy(Warp(), "block", 5, prompt_length=3)


def verify_step(drafter: HeadsDrafter, step: VerifyStep) -> Verdict:
    (verdict,) = drafter._target.verify([step])
    return verdict


@pytest.fixture
def drafter(target: Path, heads: Path) -> HeadsDrafter:
    made = with_heads(heads, support=8)(
        load_target(target, model_options(pages=20), returns_hidden=True)
    )
    assert isinstance(made, HeadsDrafter)
    return made


def test_pushed_proposals_equal_requested_ones_and_need_no_request(
    drafter: HeadsDrafter,
) -> None:
    step = VerifyStep(3, 0, (7, 8, 9), (), None, POLICY, gamma=2)
    verdict = verify_step(drafter, step)
    after_verify = DraftAfterVerify(drafter, drafter._target.runner.cache)
    rank = SimpleNamespace(on_prepared=None, pushing_round=1)
    pushed = PushedProposals(cast(RemoteTarget, rank))
    message = unpack(pack(PreparedProposals(1, after_verify.draft_after([step], [verdict]))))
    rank.on_prepared(message)
    asked = DraftStep(3, 0, (7, 8, 9, verdict.next_token), 2, POLICY)
    (direct,) = drafter.propose([asked], math.inf)
    (known,) = result_without_waiting(pushed.propose([asked], 1.0))
    assert (known.tokens, known.start, known.num_cached, known.anticipated) == (
        direct.tokens,
        4,
        6,
        None,
    )
    assert known.q is not None
    assert known.q.ids.shape == (2, 8)
    other = DraftStep(3, 0, (7, 8, 9, verdict.next_token + 1), 2, POLICY)
    for unknown in (
        other,
        DraftStep(4, 0, (7,), 2, POLICY),
        DraftStep(3, 0, asked.tokens, 0, POLICY),
    ):
        (nothing,) = result_without_waiting(pushed.propose([unknown], 1.0))
        assert (nothing.tokens, nothing.num_cached) == ((), len(unknown.tokens))


def result_without_waiting(call: Awaitable[Sequence[Proposal]]) -> Sequence[Proposal]:
    with pytest.raises(StopIteration) as done:
        next(call.__await__())
    proposals: Sequence[Proposal] = done.value.value
    return proposals


def test_hidden_states_are_kept_for_running_sequences_only_and_not_for_prompt_chunks(
    drafter: HeadsDrafter,
) -> None:
    model = drafter._target
    assert model.verify([VerifyStep(1, 0, (3, 4), (), None, POLICY, needs_verdict=False)]) == []
    assert not model.latest_hidden
    model.verify(
        [VerifyStep(1, 2, (5,), (), None, POLICY), VerifyStep(2, 0, (6,), (), None, POLICY)]
    )
    assert {seq_id: one.stop for seq_id, one in model.latest_hidden.items()} == {1: 4, 2: 2}
    model.release([1, 2])
    assert not model.latest_hidden


def test_drafts_with_penalties_see_the_committed_text(drafter: HeadsDrafter) -> None:
    """Apply penalties and biases, whichever head draws."""
    policy = Policy(
        Warp(
            temperature=0,
            presence_penalty=2.0,
            logit_bias=tuple((token, -100.0) for token in range(40, 280)),
        ),
        "block",
        1,
        1,
    )
    verdict = verify_step(drafter, VerifyStep(1, 0, (3, 4), (), None, policy))
    (proposal,) = drafter.propose(
        [DraftStep(1, 0, (3, 4, verdict.next_token), 8, policy)], math.inf
    )
    assert len(proposal.tokens) == NUM_HEADS
    assert all(token < 40 or token >= 280 for token in proposal.tokens)
    assert proposal.q is None
