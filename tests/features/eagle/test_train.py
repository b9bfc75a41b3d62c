"""The training of EAGLE-3 heads: what it unrolls is what decoding computes, and it learns."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specserve import LLM, Sampling
from specserve.cli.main import main
from specserve.errors import ModelError
from specserve.features.eagle.checkpoint import require_eagle_for
from specserve.features.eagle.drafter import EagleDrafter
from specserve.features.eagle.head_files import save_head
from specserve.features.eagle.train import (
    Lesson,
    Lessons,
    frequent_ids,
    tapped_layers,
)
from specserve.features.eagle.train_heads import Teacher
from specserve.features.eagle.trainable_head import DEPTHS, EagleModule
from specserve.models.checkpoints.library import read_config
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.hidden_taps import HiddenTaps
from specserve.types import DraftStep, Policy, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.engines import load_target, model_options

POLICY = Policy(Warp(), "speculative", 5, prompt_length=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = checkpoints.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    checkpoint = checkpoints.write(config, tmp_path_factory.mktemp("llama") / "target")
    checkpoints.add_tokenizer(checkpoint)
    return checkpoint


def test_the_unrolled_depths_are_those_of_decoding(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save a random head, draft with it, and compare q with the last row of the training's."""
    monkeypatch.setattr(
        "specserve.features.eagle.train_heads.resolve_dtype", lambda *_: torch.float32
    )
    teacher, taps = Teacher(target), tapped_layers(4)
    ids = torch.arange(0, 200, 2)
    torch.manual_seed(3)
    config = read_config(target)
    head = EagleModule(config, target_hidden=64, draft_vocab=len(ids))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())  # as in the files
    vocab = checkpoints.VOCAB
    save_head(head, config, taps, ids, fingerprint(target), vocab, tmp_path / "head")
    require_eagle_for(target, tmp_path / "head")

    model = load_target(target, model_options(pages=20), taps=HiddenTaps(taps))
    drafter = EagleDrafter.from_files(
        tmp_path / "head", model, dtype="float32", support=checkpoints.VOCAB
    )
    text = tuple(range(20, 50))
    (verdict,) = model.verify([VerifyStep(1, 0, text, (), None, POLICY)])
    text = (*text, verdict.next_token)
    (proposal,) = drafter.propose([DraftStep(1, 0, text, DEPTHS, POLICY)], math.inf)
    assert proposal.q is not None

    window = torch.tensor([*text, *proposal.tokens[: DEPTHS - 1]])
    lesson = Lesson.from_window(teacher, window, taps, ids)
    # More rows than training takes: nothing is compared with what follows the last token.
    states = teacher.module.model(window[None], output_hidden_states=True).hidden_states
    all_taps = torch.cat([states[layer][0] for layer in taps], dim=-1)[: len(text) - 1].float()
    with torch.no_grad():
        unrolled = [log_q[-1].exp() for log_q in head.unroll(all_taps, lesson.tokens, DEPTHS)]
    for depth, expected in enumerate(unrolled):
        dense = np.zeros(vocab)
        dense[proposal.q.ids[depth]] = proposal.q.probs[depth]
        np.testing.assert_allclose(dense[ids.numpy()], expected.numpy(), atol=1e-5)


def test_the_command_trains_a_head_that_the_engine_takes_for_this_target_alone(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 60)
    arguments = ["eagle", "--target", str(target), "--text", str(tmp_path / "text")]
    out = tmp_path / "head"
    options = ["--out", str(out), "--minutes", "0.03", "--draft-vocab", "100", "--threads", "1"]
    assert main([*arguments, *options]) == 0
    assert "alpha is 0." in capsys.readouterr().out
    keys: dict[str, Any] = {
        "target.dtype": "float32",
        "draft.kind": "eagle",
        "draft.path": str(out),
        "cache.pages": 60,
        "speculation.gamma": 3,
    }
    with LLM(target, **keys) as llm:
        (output,) = llm.generate([tuple(range(20, 40))], Sampling(max_tokens=12, ignore_eos=True))
    assert output.stats is not None
    assert output.stats.drafted > 0
    first = load_file(out / "model.safetensors")
    assert main([*arguments, *options[:-4], "--resume"]) == 0
    resumed = load_file(out / "model.safetensors")
    assert torch.equal(first["d2t"], resumed["d2t"])
    # It went on from there: another beginning would be as far away as its own weights are large.
    moved = (resumed["fc.weight"] - first["fc.weight"]).float().norm()
    assert 0 < moved < 0.5 * first["fc.weight"].float().norm()
    other = checkpoints.perturb(target, tmp_path / "other", 0.1)
    with pytest.raises(ModelError, match="trained for another target"):
        require_eagle_for(other, out)


def test_training_lowers_both_losses(target: Path) -> None:
    teacher, taps, ids = Teacher(target), tapped_layers(4), torch.arange(checkpoints.VOCAB)
    torch.manual_seed(1)
    head = EagleModule(read_config(target), target_hidden=64, draft_vocab=len(ids))
    window = torch.arange(20, 80)
    lesson = Lesson.from_window(teacher, window, taps, ids)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    before = [lesson.losses(head, rejection=rejects).detach() for rejects in (False, True)]
    for _ in range(40):
        optimizer.zero_grad()
        torch.autograd.backward(lesson.losses(head, rejection=False).sum())
        optimizer.step()
    after = [lesson.losses(head, rejection=rejects).detach() for rejects in (False, True)]
    for first, last in zip(before, after, strict=True):
        assert (last < 0.8 * first).all()


def test_the_most_frequent_tokens_are_drafted_and_lacking_ones_filled_up() -> None:
    windows = [torch.tensor([9, 9, 4, 9]), torch.tensor([4, 6])]
    assert frequent_ids(windows, 2).tolist() == [4, 9]
    assert frequent_ids(windows, 5).tolist() == [0, 1, 4, 6, 9]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 7, 8, 32])
def test_the_tapped_layers_are_inputs_that_the_target_has(num_layers: int) -> None:
    taps = tapped_layers(num_layers)
    assert list(taps) == sorted(taps)
    assert all(0 <= layer < num_layers for layer in taps)
    assert tapped_layers(32) == (2, 16, 29)


@pytest.mark.parametrize("option", ["--minutes", "--draft-vocab"])
def test_a_number_that_cannot_be_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "text").write_text("some text")
    arguments = ["eagle", "--target", str(target), "--text", str(tmp_path / "text")]
    assert main([*arguments, "--out", str(tmp_path / "head"), option, "0"]) == 2
    assert f"{option} must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("free_bytes", "kept"), [((100, 60), True), ((100, 40), False)])
def test_a_lesson_is_kept_while_half_of_the_memory_is_free(
    target: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: tuple[int, int], kept: bool
) -> None:
    """The target runs once over a window whose lesson is kept, and each time otherwise."""
    left = iter([free_bytes[0], *[free_bytes[1]] * 2])
    monkeypatch.setattr("specserve.features.eagle.train.available_memory", lambda: next(left))
    windows = [torch.arange(3, 40), torch.arange(50, 90)]
    teacher = Teacher(target)
    make = partial(Lesson.from_window, teacher, taps=tapped_layers(4), ids=torch.arange(64))
    lessons = Lessons(windows, make, teacher.device)
    first = lessons[1]
    assert (lessons[1] is first) is kept
    assert first.p.shape == (39, 64)
