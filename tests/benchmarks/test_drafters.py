"""The page on kinds of drafters must state what was measured, and all that it compares must do the same work."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.drafters import alpha, page, report
from benchmarks.drafters import copy_speed as copying
from benchmarks.drafters import heads_overhead as telling
from benchmarks.drafters.__main__ import SECTIONS, main
from benchmarks.drafters.alpha import Found, Judged, Share
from benchmarks.drafters.configs import ways
from benchmarks.drafters.copy_model import SHORTEST, Copyist, Course, agreement, drawn, train
from benchmarks.drafters.options import SECTIONS as NAMES
from benchmarks.drafters.rewriting import Rewriting, is_name, repeats
from specserve.config.tree import DEMO, DRAFT_KINDS, parse
from specserve.demo.corpus import held_out_prompts
from specserve.errors import ModelError
from specserve.llm import Output
from specserve.models.checkpoints.load import load_model
from specserve.tools.reproduce.page import Section
from specserve.types import Proposal, SparseRows


@pytest.fixture(scope="module")
def rewriting() -> Rewriting:
    return Rewriting.of_library()


@pytest.fixture(scope="module")
def copyist(rewriting: Rewriting, tmp_path_factory: pytest.TempPathFactory) -> Copyist:
    return Copyist.found(tmp_path_factory.mktemp("copyist"), rewriting, Course(minutes=9, steps=2))


def test_every_kind_is_measured_and_has_its_remark() -> None:
    found = ways(Path("tables"))
    kinds = {
        parse({"draft.path": "x", **keys} if keys["draft.kind"] == "heads" else keys).draft.kind
        for keys in found.values()
    }
    assert kinds == set(DRAFT_KINDS) - {"none", "random"}
    assert set(found) == set(report.REMARKS)
    assert tuple(SECTIONS) == NAMES


def test_a_share_is_held_against_what_its_drafts_promise() -> None:
    share = Share.of(
        [Judged(0, 0.5, True), Judged(1, 0.5, True), Judged(0, 1.0, True), Judged(0, 0.0, False)]
    )
    assert (share.judged, share.accepted, share.alpha, share.overlap) == (4, 3, 0.75, 0.5)
    assert share.errors_off == pytest.approx(1 / 0.5**0.5)
    found = Found(rounds=4, proposed=3, drafts=(Judged(0, 0.5, True), Judged(1, 0.2, False)))
    assert found.at(1) == Share(1, 0, 0.2, pytest.approx(0.4))
    assert found.tokens_per_round == 1.25


def test_drafts_behind_a_refusal_or_behind_the_text_are_not_judged() -> None:
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).repeat(6, 1)
    q = SparseRows(np.array([[3, 1]] * 3), np.array([[0.5, 0.5]] * 3, dtype=np.float32))
    output = Output("", (3, 1, 2), "length", prompt_token_ids=(0, 0))

    def model(*, input_ids: torch.Tensor) -> object:
        return type("Answer", (), {"logits": p[None, : input_ids.shape[1]].log()})

    proposals = [
        Proposal(0, 2, (3, 3, 1), q, 5),
        Proposal(0, 4, (2, 3), None, 6),
        Proposal(1, 2, (3,), None, 3),
    ]
    found = list(alpha.judged([output], proposals, model))
    assert [(one.place, one.accepted) for one in found] == [(0, True), (1, False), (0, True)]
    assert [one.beta for one in found] == pytest.approx(
        [0.6, 0.6, 0.3]
    )  # of the certain one: p of its token


def test_a_draft_that_is_the_target_overlaps_with_it_entirely() -> None:
    module = load_model(DEMO / "target", dtype=torch.float32, device="cpu").module
    keys = {
        "draft.kind": "neural",
        "draft.path": str(DEMO / "target"),
        "draft.dtype": "float32",
        "draft.support": 4096,
    }
    found = alpha.measured(keys, held_out_prompts(count=2, length=16), module, tokens=11)
    assert (found.share.alpha, found.proposed) == (1.0, found.rounds)
    assert found.share.overlap == pytest.approx(1.0, abs=1e-4)


def test_what_drafts_seldom_is_judged_where_it_does() -> None:
    module = load_model(DEMO / "target", dtype=torch.float32, device="cpu").module
    found = alpha.measured(
        {"draft.kind": "prompt_copy"}, held_out_prompts(count=4, length=100), module, tokens=24
    )
    assert 0 < found.proposed < found.rounds
    assert 0 < found.share.overlap < 1
    assert abs(found.share.errors_off) < 5


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_task_changes_one_recurring_name_and_nothing_else(
    rewriting: Rewriting, shuffled: bool
) -> None:
    chance = random.Random(3)
    for length in (32, 200):
        task = rewriting.drawn(length, chance, held_out=True, shuffled=shuffled)
        begin, old, new, _, *source, _ = task.prompt
        assert len(source) == length
        assert task.answer == (*(new if token == old else token for token in source), rewriting.end)
        assert source.count(old) >= 2
        assert new not in source
        assert {old, new} <= set(rewriting.names)
        assert not repeats(source)
        assert begin == rewriting.end


def test_a_name_is_a_whole_word() -> None:
    assert all(map(is_name, ("self", " value", "__init__")))
    assert not any(map(is_name, ("  ", "=", "in", " (self", "\n    ")))


def test_four_tokens_that_come_twice_are_noticed() -> None:
    assert repeats([1, 2, 3, 4, 5, 1, 2, 3, 4])
    assert not repeats([1, 2, 3, 4, 5, 1, 2, 3, 5])


def test_the_copying_model_begins_with_a_rough_idea_of_copying(rewriting: Rewriting) -> None:
    """A hundredth of the tokens would be luck; what is missing is learnt. One step is too short to have learnt it."""
    chance = random.Random(0)
    tasks = [rewriting.drawn(SHORTEST, chance, shuffled=True) for _ in range(8)]
    right, _ = agreement(train(rewriting, Course(minutes=9, steps=1)), tasks)
    assert right > 0.5


def test_texts_of_a_batch_are_of_one_length_and_grow(rewriting: Rewriting) -> None:
    chance = random.Random(0)
    early, late = (
        max(len(drawn(rewriting, progress, chance)[0].answer) for _ in range(20))
        for progress in (0.0, 1.0)
    )
    assert early == SHORTEST + 1
    assert late > 100
    assert len({len(task.prompt) for task in drawn(rewriting, 0.7, chance)}) == 1


def test_a_trained_copy_is_found_again(copyist: Copyist) -> None:
    before = (copyist.directory / "model.safetensors").stat().st_mtime_ns
    assert (
        Copyist.found(copyist.directory, copyist.rewriting, Course(minutes=9, steps=2)) == copyist
    )
    assert (copyist.directory / "model.safetensors").stat().st_mtime_ns == before
    assert copyist.described.startswith("3 layers")


def test_both_ways_of_copying_write_the_same_and_the_page_says_so(
    copyist: Copyist, tmp_path: Path
) -> None:
    budget = report.Budget(params=3_000_000, texts=2, length=32, turns=1)
    section = report.copy(copyist, tmp_path / "widened", budget)
    assert section.title == report.COPY
    plain, copied = (line.split("|") for line in section.text.splitlines()[-2:])
    assert [plain[1].strip(), copied[1].strip()] == ["plain", "prompt_copy"]
    assert float(copied[4]) < float(plain[4])  # rounds


def test_a_text_is_right_to_the_last_token_or_wrong(rewriting: Rewriting) -> None:
    one, other = copying.tasks(rewriting, count=2, length=32)
    assert copying.share_right([one.answer, other.answer], [one, other]) == 1
    assert copying.share_right([one.answer, other.answer[:-1]], [one, other]) == 0.5


def test_heads_are_timed_on_their_own_target_alone() -> None:
    (found,) = telling.added(DEMO / "target", sequences=(2,), turns=3, number=2).values()
    assert found.ratios == sorted(found.ratios)
    assert min(found.alone + found.telling) > 0
    with pytest.raises(ModelError, match="another target"):
        telling.added(DEMO / "draft", sequences=(1,), turns=1, number=1)


def test_a_section_that_was_not_measured_anew_stays(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    page.write(file, [Section("b", "of b"), Section("a", "of a")], ("a", "b", "c"))
    page.write(file, [Section("c", "of c"), Section("a", "newer, of a")], ("a", "b", "c"))
    text = file.read_text()
    assert text.startswith(page.TITLE)
    assert text.endswith("## a\n\nnewer, of a\n\n## b\n\nof b\n\n## c\n\nof c\n")


def test_an_unknown_section_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "alhpa"])
    assert "alhpa" in capsys.readouterr().err
