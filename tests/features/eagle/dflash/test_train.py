"""The training of DFlash and DSpark drafts: its blocks are decoded alike, and it learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve import LLM, Sampling
from specserve.cli.main import main
from specserve.errors import ModelError
from specserve.features.eagle.dflash.config import DFlashInfo
from specserve.features.eagle.dflash.drafter import DFlashDrafter
from specserve.features.eagle.dflash.train import BlockLesson, Shape, new_draft, save_draft
from specserve.features.eagle.dflash.weights import require_dflash_for
from specserve.features.eagle.train import tapped_layers
from specserve.features.eagle.train_heads import Teacher
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.hidden_taps import HiddenTaps
from specserve.types import DraftStep, Policy, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.engines import load_target, model_options

POLICY = Policy(Warp(), "speculative", 5, prompt_length=3)
SHAPES = {"DFlash": Shape(2, 5, 0), "DSpark": Shape(2, 4, 8)}
GAMMA = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = checkpoints.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    checkpoint = checkpoints.write(config, tmp_path_factory.mktemp("llama") / "target")
    checkpoints.add_tokenizer(checkpoint)
    return checkpoint


@pytest.fixture
def teacher(target: Path, monkeypatch: pytest.MonkeyPatch) -> Teacher:
    monkeypatch.setattr(
        "specserve.features.eagle.train_heads.resolve_dtype", lambda *_: torch.float32
    )
    return Teacher(target)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_a_block_learns_from_is_what_decoding_draws_from(
    target: Path, teacher: Teacher, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save a random draft, draft with it, and compare q with that of the training's losses."""
    torch.manual_seed(3)
    shape, taps = SHAPES[kind], tapped_layers(4)
    draft = new_draft(teacher, shape, len(taps))
    with torch.no_grad():
        for parameter in draft.parameters():
            moved = parameter + 0.05 * torch.randn(parameter.shape)
            parameter.copy_(moved.to(torch.bfloat16).float())  # as in the files
    save_draft(draft, teacher, shape, taps, fingerprint(target), tmp_path / "draft")
    assert require_dflash_for(target, tmp_path / "draft").max_drafted == GAMMA

    model = load_target(target, model_options(pages=20), taps=HiddenTaps(taps))
    drafter = DFlashDrafter.from_files(
        tmp_path / "draft", model, dtype="float32", support=checkpoints.VOCAB
    )
    text = tuple(range(20, 50))
    (verdict,) = model.verify([VerifyStep(1, 0, text, (), None, POLICY)])
    text = (*text, verdict.next_token)
    (proposal,) = drafter.propose([DraftStep(1, 0, text, GAMMA, POLICY)], math.inf)
    assert proposal.q is not None
    assert len(proposal.tokens) == GAMMA

    found: list[Tensor] = []

    def keep(log_q: Tensor, p: Tensor, **_: object) -> Tensor:
        found.append(log_q)
        return torch.zeros_like(p)

    monkeypatch.setattr("specserve.features.eagle.dflash.train.F.kl_div", keep)
    window = torch.tensor([*text, *proposal.tokens])
    lesson = BlockLesson.from_window(teacher, taps, window)
    anchors = torch.tensor([len(text) - 1, 3])
    with torch.no_grad():
        lesson.losses(draft, teacher, shape, anchors, rejection=False)
    expected = found[0][0].exp().numpy()
    dense = np.zeros_like(expected)
    np.put_along_axis(dense, proposal.q.ids, proposal.q.probs, axis=1)
    np.testing.assert_allclose(dense, expected, atol=1e-5)


@pytest.mark.parametrize("kind", SHAPES)
def test_training_lowers_both_losses(teacher: Teacher, kind: str) -> None:
    torch.manual_seed(1)
    shape, taps = SHAPES[kind], tapped_layers(4)
    draft = new_draft(teacher, shape, len(taps))
    lesson = BlockLesson.from_window(teacher, taps, torch.arange(20, 80))
    anchors = torch.arange(5, 50, 3)

    def losses(*, rejection: bool) -> Tensor:
        return lesson.losses(draft, teacher, shape, anchors, rejection=rejection)

    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    before = [losses(rejection=rejects).detach() for rejects in (False, True)]
    for _ in range(40):
        optimizer.zero_grad()
        torch.autograd.backward(losses(rejection=False).sum())
        optimizer.step()
    after = [losses(rejection=rejects).detach() for rejects in (False, True)]
    for first, last in zip(before, after, strict=True):
        assert (last < 0.8 * first).all()


@pytest.mark.parametrize("rank", ["0", "8"])
def test_the_command_trains_a_draft_that_the_engine_takes_for_this_target_alone(
    target: Path, tmp_path: Path, rank: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 60)
    out, files = tmp_path / "draft", ["--target", str(target), "--text", str(tmp_path / "text")]
    sizes = ["--layers", "1", "--block", "4", "--markov-rank", rank]
    options = ["--out", str(out), "--minutes", "0.02", "--threads", "1", *sizes]
    assert main(["dflash", *files, *options]) == 0
    printed = capsys.readouterr().out
    assert f"is a {'DFlash' if rank == '0' else 'DSpark'} draft" in printed
    assert "alpha is 0." in printed
    info = DFlashInfo.from_directory(out)
    assert (info.num_layers, info.max_drafted) == (1, 3 if rank == "0" else 4)
    keys: dict[str, Any] = {
        "target.dtype": "float32",
        "draft.kind": "dflash",
        "draft.path": str(out),
        "cache.pages": 60,
        "speculation.gamma": 3,
    }
    with LLM(target, **keys) as llm:
        (output,) = llm.generate([tuple(range(20, 40))], Sampling(max_tokens=12, ignore_eos=True))
    assert output.stats is not None
    assert output.stats.drafted > 0
    other = checkpoints.perturb(target, tmp_path / "other", 0.1)
    with pytest.raises(ModelError, match="trained for another target"):
        require_dflash_for(other, out)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--block", "1"], "--block must be at least 2, not 1"),
        (["--layers", "0"], "--layers must be above 0, not 0"),
        (["--markov-rank", "-1"], "--markov-rank must be 0 or more, not -1"),
    ],
)
def test_sizes_that_make_no_draft_are_refused(
    target: Path,
    tmp_path: Path,
    options: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 60)
    files = ["--target", str(target), "--text", str(tmp_path / "text"), "--out", str(tmp_path)]
    assert main(["dflash", *files, *options]) != 0
    assert named in capsys.readouterr().err
