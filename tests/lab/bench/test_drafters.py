"""The page on drafters states what was measured, and what it compares does the same work."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.bench.drafters import alpha, copy_speed, heads_overhead, report
from lab.bench.drafters.__main__ import SECTIONS, main
from lab.bench.drafters.alpha import AlphaEstimate, DrafterMeasurement, VerifiedToken
from lab.bench.drafters.configs import drafter_configs
from lab.bench.drafters.copy_model import (
    MIN_LENGTH,
    CopyModel,
    TrainingBudget,
    greedy_accuracy,
    sample_batch,
    train,
)
from lab.bench.drafters.options import SECTIONS as NAMES
from lab.bench.drafters.options import Budget
from lab.bench.drafters.rewriting import RewritingCorpus, has_repeats, is_name
from lab.papers.page import Section
from specserve.config.sections import DRAFT_KINDS
from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import held_out_prompts
from specserve.errors import ModelError
from specserve.llm.llm import Output
from specserve.models.checkpoints.load import load_model
from specserve.types import Proposal, SparseDistribution


@pytest.fixture(scope="module")
def corpus() -> RewritingCorpus:
    return RewritingCorpus.from_standard_library()


@pytest.fixture(scope="module")
def copy_model(corpus: RewritingCorpus, tmp_path_factory: pytest.TempPathFactory) -> CopyModel:
    return CopyModel.load_or_train(
        tmp_path_factory.mktemp("copy_model"), corpus, TrainingBudget(minutes=9, steps=2)
    )


def test_every_kind_of_drafter_is_measured_and_has_a_remark() -> None:
    configs = drafter_configs(Path("tables"), Path("eagle"), Path("dflash"))
    kinds = {
        config_from_keys(
            {"draft.path": "x", **keys} if keys["draft.kind"] == "heads" else keys
        ).draft.kind
        for keys in configs.values()
    }
    assert kinds == set(DRAFT_KINDS) - {"none", "random"}
    assert set(configs) == set(report.REMARKS)
    assert tuple(SECTIONS) == NAMES


def test_an_estimate_compares_acceptance_with_what_p_and_q_predict() -> None:
    estimate = AlphaEstimate.from_tokens(
        [
            VerifiedToken(0, 0.5, True),
            VerifiedToken(1, 0.5, True),
            VerifiedToken(0, 1.0, True),
            VerifiedToken(0, 0.0, False),
        ]
    )
    assert (estimate.verified, estimate.accepted, estimate.alpha, estimate.overlap) == (
        4,
        3,
        0.75,
        0.5,
    )
    assert estimate.standard_errors_off == pytest.approx(1 / 0.5**0.5)
    measurement = DrafterMeasurement(
        rounds=4,
        rounds_with_drafts=3,
        tokens=(VerifiedToken(0, 0.5, True), VerifiedToken(1, 0.2, False)),
    )
    error: Any = pytest.approx(0.4)
    assert measurement.estimate_at(1) == AlphaEstimate(1, 0, 0.2, error)
    assert measurement.tokens_per_round == 1.25


def test_draft_tokens_after_a_rejection_or_past_the_text_do_not_count_as_verified() -> None:
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).repeat(6, 1)
    q = SparseDistribution(np.array([[3, 1]] * 3), np.array([[0.5, 0.5]] * 3, dtype=np.float32))
    output = Output("", (3, 1, 2), "length", prompt_token_ids=(0, 0))

    def model(*, input_ids: torch.Tensor) -> object:
        return type("Answer", (), {"logits": p[None, : input_ids.shape[1]].log()})

    proposals = [
        Proposal(0, 2, (3, 3, 1), q, 5),
        Proposal(0, 4, (2, 3), None, 6),
        Proposal(1, 2, (3,), None, 3),
    ]
    found = list(alpha.verified_tokens([output], proposals, model))
    assert [(one.position, one.accepted) for one in found] == [(0, True), (1, False), (0, True)]
    # the last is of a one-hot proposal: p of its token
    assert [one.beta for one in found] == pytest.approx([0.6, 0.6, 0.3])


def test_a_draft_that_is_the_target_overlaps_with_it_entirely() -> None:
    module = load_model(DEMO / "target", dtype=torch.float32, device="cpu").module
    keys = {
        "draft.kind": "neural",
        "draft.path": str(DEMO / "target"),
        "draft.dtype": "float32",
        "draft.support": 4096,
    }
    measurement = alpha.measure_drafter(
        keys, held_out_prompts(count=2, length=16), module, tokens=11
    )
    assert (measurement.estimate.alpha, measurement.rounds_with_drafts) == (1.0, measurement.rounds)
    assert measurement.estimate.overlap == pytest.approx(1.0, abs=1e-4)


def test_a_drafter_that_seldom_drafts_is_measured_in_the_rounds_where_it_does() -> None:
    module = load_model(DEMO / "target", dtype=torch.float32, device="cpu").module
    measurement = alpha.measure_drafter(
        {"draft.kind": "prompt_copy"}, held_out_prompts(count=4, length=100), module, tokens=24
    )
    assert 0 < measurement.rounds_with_drafts < measurement.rounds
    assert 0 < measurement.estimate.overlap < 1
    assert abs(measurement.estimate.standard_errors_off) < 5


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_task_changes_one_recurring_name_and_nothing_else(
    corpus: RewritingCorpus, shuffled: bool
) -> None:
    rng = random.Random(3)
    for length in (32, 200):
        task = corpus.sample_task(length, rng, held_out=True, shuffled=shuffled)
        begin, old, new, _, *source, _ = task.prompt
        assert len(source) == length
        assert task.answer == (*(new if token == old else token for token in source), corpus.end)
        assert source.count(old) >= 2
        assert new not in source
        assert {old, new} <= set(corpus.names)
        assert not has_repeats(source)
        assert begin == corpus.end


def test_a_name_is_a_whole_word() -> None:
    assert all(map(is_name, ("self", " value", "__init__")))
    assert not any(map(is_name, ("  ", "=", "in", " (self", "\n    ")))


def test_four_tokens_that_occur_twice_are_detected() -> None:
    assert has_repeats([1, 2, 3, 4, 5, 1, 2, 3, 4])
    assert not has_repeats([1, 2, 3, 4, 5, 1, 2, 3, 5])


def test_the_copying_model_copies_roughly_before_it_is_trained(corpus: RewritingCorpus) -> None:
    """Chance would get a hundredth of the tokens right.

    Training learns the rest; a single step is too short to have learned it.
    """
    rng = random.Random(0)
    tasks = [corpus.sample_task(MIN_LENGTH, rng, shuffled=True) for _ in range(8)]
    correct, _ = greedy_accuracy(train(corpus, TrainingBudget(minutes=9, steps=1)), tasks)
    assert correct > 0.5


def test_texts_of_a_batch_have_one_length_and_grow_during_training(corpus: RewritingCorpus) -> None:
    rng = random.Random(0)
    early, late = (
        max(len(sample_batch(corpus, progress, rng)[0].answer) for _ in range(20))
        for progress in (0.0, 1.0)
    )
    assert early == MIN_LENGTH + 1
    assert late > 100
    assert len({len(task.prompt) for task in sample_batch(corpus, 0.7, rng)}) == 1


def test_a_trained_copying_model_is_loaded_from_its_directory(copy_model: CopyModel) -> None:
    before = (copy_model.directory / "model.safetensors").stat().st_mtime_ns
    assert (
        CopyModel.load_or_train(
            copy_model.directory, copy_model.corpus, TrainingBudget(minutes=9, steps=2)
        )
        == copy_model
    )
    assert (copy_model.directory / "model.safetensors").stat().st_mtime_ns == before
    assert copy_model.description.startswith("3 layers")


def test_prompt_copy_generates_the_plain_text_in_fewer_rounds(
    copy_model: CopyModel, tmp_path: Path
) -> None:
    budget = Budget(params=3_000_000, texts=2, length=32, turns=1)
    section = report.measure_copying(copy_model, tmp_path / "widened", budget)
    assert section.title == report.COPY
    plain, prompt_copy = (line.split("|") for line in section.text.splitlines()[-2:])
    assert [plain[1].strip(), prompt_copy[1].strip()] == ["plain", "prompt_copy"]
    assert float(prompt_copy[4]) < float(plain[4])  # rounds


def test_a_text_is_correct_only_to_its_last_token(corpus: RewritingCorpus) -> None:
    one, other = copy_speed.held_out_tasks(corpus, count=2, length=32)
    assert copy_speed.share_correct([one.answer, other.answer], [one, other]) == 1
    assert copy_speed.share_correct([one.answer, other.answer[:-1]], [one, other]) == 0.5


def test_heads_are_timed_only_on_their_own_target() -> None:
    (overhead,) = heads_overhead.measure_overhead(
        DEMO / "target", sequences=(2,), turns=3, rounds=2
    ).values()
    assert overhead.ratios == sorted(overhead.ratios)
    assert min(overhead.without_heads + overhead.with_heads) > 0
    with pytest.raises(ModelError, match="another target"):
        heads_overhead.measure_overhead(DEMO / "draft", sequences=(1,), turns=1, rounds=1)


def test_a_section_that_was_not_measured_keeps_its_text(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    report.write_page(file, [Section("b", "of b"), Section("a", "of a")], ("a", "b", "c"))
    report.write_page(file, [Section("c", "of c"), Section("a", "newer, of a")], ("a", "b", "c"))
    text = file.read_text()
    assert text.startswith(report.TITLE)
    assert text.endswith("## a\n\nnewer, of a\n\n## b\n\nof b\n\n## c\n\nof c\n")


def test_an_unknown_section_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "alhpa"])
    assert "alhpa" in capsys.readouterr().err
