"""Layers left out, heads fitted and loaded, and what is refused: on tiny checkpoints, without an engine unless one is needed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from specserve import LLM, Sampling
from specserve.cli.main import main
from specserve.cluster.remote import SentAhead
from specserve.config.tree import DEMO, parse
from specserve.drafters.heads import LONGEST_REST, HeadsDrafter, SkippingDrafter, Unasked
from specserve.drafters.registry import open_drafter
from specserve.errors import ConfigError, ModelError, ModelNotFound
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import Weights, fingerprint
from specserve.models.model import Placement, open_model
from specserve.models.runner import Runner
from specserve.models.skip import skipped
from specserve.types import DraftStep, Policy, Step, Verdict, VerifyStep, Warp
from specserve.wire.messages import Prepared, pack, unpack
from tests.support import checkpoints
from tests.support.engines import GREEDY, opened_target, placement
from tests.support.self_speculative_engines import NUM_HEADS, random_heads, with_heads

TEXT = tuple(range(20, 60))
FEW = {
    "target.dtype": "float32",
    "target.threads": 1,
    "draft.dtype": "float32",
    "draft.threads": 1,
    "cache.pages": 60,
    "speculation.gamma": 3,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = checkpoints.make("gemma3", tmp_path_factory.mktemp("target") / "gemma3")
    checkpoints.add_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_heads(
        target,
        tmp_path_factory.mktemp("heads") / "heads",
        hidden_size=64,
        vocab_size=checkpoints.VOCAB,
    )


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(2, (1,)), (3, (1,)), (4, (1,)), (8, (1, 3, 5)), (9, (1, 3, 5, 7))],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_by_default_about_every_second_layer_is_left_out_and_never_the_first_or_the_last_of_three(
    num_layers: int, expected: tuple[int, ...]
) -> None:
    assert skipped(num_layers, None) == expected


@pytest.mark.parametrize(
    ("num_layers", "wanted"),
    [(2, (0, 1)), (1, None), (4, (1, 4))],
    ids=["all", "of a single one", "unknown"],
)
def test_a_skip_list_that_leaves_no_layer_or_names_one_that_is_not_there_is_refused(
    num_layers: int, wanted: tuple[int, ...] | None
) -> None:
    with pytest.raises(ConfigError, match=r"draft\.skip"):
        skipped(num_layers, wanted)


@pytest.mark.parametrize("name", checkpoints.ARCHITECTURES)
def test_a_model_without_a_layer_is_the_same_read_in_part_or_lent_by_the_whole_one(
    name: str, tmp_path: Path
) -> None:
    """By the library's code with the layer taken out by hand; the layers that stay keep their own pages."""
    directory = checkpoints.make(name, tmp_path / name)
    where = Placement(dtype="float32", device="cpu", pages=40)
    whole, part = open_model(directory, where), open_model(directory, where, skip=(1,))
    assert whole.network is not None
    assert (part.spec.num_layers, len(part.runner.cache.keys)) == (whole.spec.num_layers - 1,) * 2
    lent = Runner(whole.network.without((1,)), whole.runner.cache, device=whole.runner.device)
    own = part.runner.run([Step(0, 0, TEXT)], [len(TEXT)])
    assert torch.allclose(lent.run([Step(0, 0, TEXT)], [len(TEXT)]), own, atol=1e-4)
    assert not torch.allclose(whole.runner.run([Step(0, 0, TEXT)], [len(TEXT)]), own, atol=1e-2)


def test_of_what_is_left_out_nothing_is_read(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    kept = Weights.read

    def recorded(self: Weights, name: str, **ranges: object) -> torch.Tensor:
        read.append(name)
        return kept(self, name, **ranges)  # type: ignore[arg-type]

    monkeypatch.setattr(Weights, "read", recorded)
    load_model(target, dtype=torch.float32, device="cpu", skip=(0, 2))
    assert any(".layers.1." in name for name in read)
    assert not any(".layers.0." in name or ".layers.2." in name for name in read)


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
def test_what_a_tied_drafter_cannot_use_is_refused_naming_the_key(
    keys: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(keys)


def refuse_to_open(*_: object, **__: object) -> None:
    pytest.fail("weights were read before the mistake was found")


def test_mistakes_are_found_before_any_weights_are_read(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.inprocess.open_rank", refuse_to_open)
    with pytest.raises(ConfigError, match="0 to 2"):
        LLM(target, **{"draft.kind": "layer_skip", "draft.skip": [3]})
    with pytest.raises(ModelError, match="another target"):
        LLM(target, **{"draft.kind": "heads", "draft.path": str(DEMO / "heads")})
    with pytest.raises(ModelNotFound, match="no heads"):
        LLM(target, **{"draft.kind": "heads", "draft.path": str(tmp_path)})
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(ModelError, match="does not say"):
        LLM(target, **{"draft.kind": "heads", "draft.path": str(tmp_path)})


def test_the_demo_target_has_heads_of_its_own() -> None:
    assert parse({"draft.kind": "heads"}).draft.path == str(DEMO / "heads")
    assert parse({"draft.kind": "heads", "target.path": str(DEMO / "target")}).draft.path == str(
        DEMO / "heads"
    )
    assert sum(file.stat().st_size for file in (DEMO / "heads").iterdir()) < 1.2e6


@pytest.mark.parametrize("kind", ["layer_skip", "heads"])
def test_a_model_run_by_the_librarys_code_writes_its_own_text_with_either_kind(
    target: Path, heads: Path, kind: str
) -> None:
    """Gemma 3 is not fused: its hidden state and its layers are found in the library's module."""
    keys = {**FEW, "draft.kind": kind} | (
        {"draft.path": str(heads)} if kind == "heads" else {"draft.skip": [1]}
    )
    wanted = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(target, **FEW | {"draft.kind": "none"}) as plain, LLM(target, **keys) as llm:
        outputs = llm.generate([TEXT, TEXT[:7]], wanted)
        assert [output.token_ids for output in outputs] == [
            output.token_ids for output in plain.generate([TEXT, TEXT[:7]], wanted)
        ]
    assert all(output.stats and output.stats.drafted for output in outputs)


def test_with_no_layer_left_out_every_draft_is_accepted(target: Path) -> None:
    """What the drafter reads of the shared pages is then what the target itself would."""
    with LLM(target, **FEW | {"draft.kind": "layer_skip", "draft.skip": []}) as llm:
        (output,) = llm.generate(
            [TEXT],
            Sampling(max_tokens=40, seed=1, ignore_eos=True, speculation={"verifier": "coupled"}),
        )
    assert output.stats is not None
    assert output.stats.accepted == output.stats.drafted > 20


def test_with_a_device_of_its_own_it_reads_its_layers_from_the_targets_checkpoint_and_prepares_for_the_verdict(
    target: Path,
) -> None:
    config = parse(
        {**FEW, "target.path": str(target), "draft.kind": "layer_skip", "draft.skip": [1]}
    )
    drafter = open_drafter(config, target_vocab_size=checkpoints.VOCAB, alone=True)
    policy = Policy(GREEDY, "block", 1, len(TEXT))
    (first,) = drafter.propose([DraftStep(1, 0, TEXT, 4, policy)], math.inf)
    drafter.prepare(bool)
    (second,) = drafter.propose(
        [DraftStep(1, first.held, (*first.tokens[3:], 9), 4, policy)], math.inf
    )
    assert (len(first.tokens), len(second.tokens)) == (4, 4)
    assert second.anticipated is not None, "nothing was prepared"
    part = open_model(target, placement(), skip=(1,)).runner
    assert part.run([Step(0, 0, TEXT)], [1]).argmax().item() == first.tokens[0]


def fitted(target: Path, out: Path, text: Path, *more: str) -> int:
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
    assert fitted(target, tmp_path / "heads", tmp_path / "text", "--threads", "1") == 0
    assert "alpha is 0." in capsys.readouterr().out
    assert any(
        tensor.any() for tensor in load_file(tmp_path / "heads" / "heads.safetensors").values()
    ), "nothing was learnt"
    assert json.loads((tmp_path / "heads" / "heads.json").read_text())["num_heads"] == 2
    with LLM(target, **FEW | {"draft.kind": "heads", "draft.path": str(tmp_path / "heads")}) as llm:
        (output,) = llm.generate([TEXT], Sampling(max_tokens=12, seed=1, ignore_eos=True))
    assert output.stats is not None
    assert output.stats.drafted > 0
    other = checkpoints.perturbed(target, tmp_path / "other", 0.1)
    with pytest.raises(ModelError, match="another target"):
        LLM(other, **{"draft.kind": "heads", "draft.path": str(tmp_path / "heads")})


def test_a_text_that_is_too_short_to_fit_to_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a")
    assert fitted(target, tmp_path / "heads", tmp_path / "text") == 2
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


def judged(drafter: HeadsDrafter, step: VerifyStep) -> Verdict:
    (verdict,) = drafter._target.verify([step])
    return verdict


@pytest.fixture
def drafter(target: Path, heads: Path) -> HeadsDrafter:
    made = with_heads(heads, support=8)(
        opened_target(target, placement(pages=20), tells_hidden=True)
    )
    assert isinstance(made, HeadsDrafter)
    return made


def test_what_is_sent_ahead_is_what_would_be_asked_for_and_costs_no_question(
    drafter: HeadsDrafter,
) -> None:
    step = VerifyStep(3, 0, (7, 8, 9), (), None, POLICY)
    verdict = judged(drafter, step)
    rank = SimpleNamespace(unasked=None)
    ahead = SentAhead(rank)  # type: ignore[arg-type]
    message = unpack(pack(Prepared(1, Unasked(drafter).after([step], [verdict]))))
    rank.unasked(message)
    asked = DraftStep(3, 0, (7, 8, 9, verdict.next_token), 2, POLICY)
    (direct,), (known,) = drafter.propose([asked], math.inf), _at_once(ahead.propose([asked], 1.0))
    assert (known.tokens, known.start, known.held, known.anticipated) == (direct.tokens, 4, 6, True)
    assert known.q is not None
    assert known.q.ids.shape == (2, 8)
    other = DraftStep(3, 0, (7, 8, 9, verdict.next_token + 1), 2, POLICY)
    for unknown in (
        other,
        DraftStep(4, 0, (7,), 2, POLICY),
        DraftStep(3, 0, asked.tokens, 0, POLICY),
    ):
        (nothing,) = _at_once(ahead.propose([unknown], 1.0))
        assert (nothing.tokens, nothing.held) == ((), len(unknown.tokens))


def _at_once(call):  # type: ignore[no-untyped-def]
    with pytest.raises(StopIteration) as done:
        call.send(None)
    return done.value.value


def test_a_sequence_that_leaves_its_proposals_unused_gets_them_ever_more_seldom(
    drafter: HeadsDrafter,
) -> None:
    unasked, made, tokens = Unasked(drafter), [], (7, 8, 9)
    for passed in range(100):
        step = VerifyStep(
            3,
            0 if not passed else len(tokens) - 1,
            tokens if not passed else tokens[-1:],
            (),
            None,
            POLICY,
        )
        verdict = judged(drafter, step)
        made.append(bool(unasked.after([step], [verdict])))
        tokens += (verdict.next_token,)
    assert made[:4] == [True, True, False, True]
    assert sum(made) <= 10
    assert any(made[-LONGEST_REST:])
    used = VerifyStep(3, len(tokens) - 1, tokens[-1:], (5,), None, POLICY)
    assert unasked.after([used], [judged(drafter, used)])


def test_rows_are_kept_of_running_sequences_alone_and_a_chunk_of_a_prompt_has_none(
    drafter: HeadsDrafter,
) -> None:
    model = drafter._target
    assert model.verify([VerifyStep(1, 0, (3, 4), (), None, POLICY, decide=False)]) == []
    assert not model.newest
    model.verify(
        [VerifyStep(1, 2, (5,), (), None, POLICY), VerifyStep(2, 0, (6,), (), None, POLICY)]
    )
    assert {seq_id: one.stop for seq_id, one in model.newest.items()} == {1: 4, 2: 2}
    model.release([1, 2])
    assert not model.newest


def test_drafts_with_penalties_see_the_committed_text(drafter: HeadsDrafter) -> None:
    """A token that was written is penalised out of reach, whichever head draws."""
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
    verdict = judged(drafter, VerifyStep(1, 0, (3, 4), (), None, policy))
    (proposal,) = drafter.propose(
        [DraftStep(1, 0, (3, 4, verdict.next_token), 8, policy)], math.inf
    )
    assert len(proposal.tokens) == NUM_HEADS
    assert all(token < 40 or token >= 280 for token in proposal.tokens)
    assert proposal.q is None


def test_a_skipping_drafter_neither_holds_nor_names_pages_of_its_own(target: Path) -> None:
    model = opened_target(target, placement(pages=20))
    drafter, cache = SkippingDrafter(model, (1,), support=8), model.runner.cache
    policy = Policy(GREEDY, "block", 1, 15)
    (verdict,) = model.verify([VerifyStep(1, 0, TEXT[:15], (), None, policy)])
    names = dict(cache._pages._names)
    (proposal,) = drafter.propose(
        [DraftStep(1, 0, (*TEXT[:15], verdict.next_token), 12, policy)], math.inf
    )
    assert len(proposal.tokens) == 12
    drafter.propose([DraftStep(1, 15, (verdict.next_token,), 14, policy)], math.inf)
    assert cache._pages._names == names, "a page with drafts in it can be found by others"
    model.verify([VerifyStep(1, 15, (verdict.next_token,), proposal.tokens, None, policy)])
    cache.check()
    model.release([1])
    assert cache.num_used == 0
