"""A draft with another tokenizer through the whole of `LLM`, from the files on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from specserve import LLM, Sampling
from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import draft_translation
from specserve.config.tree import DEMO, config_from_keys
from specserve.errors import TokenizerMismatch
from specserve.features.other_tokenizer.opening import RunnerTranslation
from specserve.llm.local_engine import Output
from specserve.tools.doctor import models
from specserve.tools.doctor.findings import Grade
from tests.llm.test_inprocess import refuse_to_open
from tests.support.other_tokenizer import renumbered_draft

PROMPTS = ("def read_lines(path):\n", "import os\n\nclass Näme: # 日本\n", "x = {", "try:\n    ")
SMALL = {"demo.size": "none", "cache.pages": 64, "speculation.gamma": 4}
SAMPLINGS = {
    "greedy": Sampling(max_tokens=24, temperature=0.0, ignore_eos=True),
    "seeded": Sampling(max_tokens=24, temperature=0.8, seed=7, ignore_eos=True),
    "changed": Sampling(
        max_tokens=24, seed=3, logit_bias={281: 3.0}, presence_penalty=0.5, bad_words=["self"]
    ),
}


def generate(draft: Path | None, sampling: Sampling) -> list[Output]:
    with LLM(
        None,
        None if draft is None else str(draft),
        **{"draft.kind": "none" if draft is None else "neural", **SMALL},
    ) as llm:
        return llm.generate(list(PROMPTS), sampling)


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return renumbered_draft(tmp_path_factory.mktemp("drafts") / "renumbered")


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return renumbered_draft(tmp_path_factory.mktemp("drafts") / "smaller", vocab=2000)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_renumbered_draft_proposes_what_the_demo_draft_does(renumbered: Path, name: str) -> None:
    """Token by token: all tokens are shared, and the noise goes by the target's ids."""
    ours, demos = (generate(draft, SAMPLINGS[name]) for draft in (renumbered, DEMO / "draft"))
    assert [one.token_ids for one in ours] == [one.token_ids for one in demos]
    assert [one.stats for one in ours] == [one.stats for one in demos]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_texts_are_those_without_a_draft(smaller: Path, name: str) -> None:
    drafted, plain = (generate(draft, SAMPLINGS[name]) for draft in (smaller, None))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    stats = [one.stats for one in drafted if one.stats]
    assert sum(one.accepted for one in stats) > 0.1 * sum(one.drafted for one in stats) > 0


def test_a_text_under_a_grammar_is_that_without_a_draft(smaller: Path) -> None:
    words = {"regex": r"(import|from|return) [a-z_]+(, [a-z_]+)*\n日本"}
    sampling = Sampling(max_tokens=24, temperature=0.0, guided=words)
    drafted, plain = generate(smaller, sampling), generate(None, sampling)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


def test_what_is_shared_is_logged(smaller: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_from_keys({"draft.path": str(smaller)}, {})
    with caplog.at_level(logging.INFO):
        translation = draft_translation(config)
    assert isinstance(translation, RunnerTranslation)
    assert translation.tokens.num_shared == 2000
    assert "1,999 of the draft's 1,999 tokens are shared with the target" in caplog.text


def test_the_doctor_warns_that_draft_tokens_are_translated(smaller: Path) -> None:
    target, draft = Tokenizer.load(DEMO / "target"), Tokenizer.load(smaller)
    (found,) = models.same_tokens(target, draft, key="draft")
    assert found.grade is Grade.WARN
    assert "draft tokens are translated" in found.remedy
    assert "1,999 of the draft's 1,999 tokens are shared with the target" in found.remedy
    (stage,) = models.same_tokens(target, draft, key="draft", is_stage=True)
    assert stage.found == found.found


def test_tokenizers_with_little_in_common_are_refused_before_weights_are_loaded(
    smaller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.llm.inprocess.open_target", refuse_to_open)
    other = tmp_path / "other"
    other.mkdir()
    for file in smaller.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    names = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    tokenizer["model"] = {
        "type": "WordLevel",
        "unk_token": "<|endoftext|>",
        "vocab": {name if name.startswith("<|") else f"ж{i}": i for i, name in enumerate(names)},
    }
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TokenizerMismatch, match=r"shares 0 of its 1,999 tokens"):
        LLM(None, str(other))


def test_added_tokens_alone_are_no_other_tokenizer(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (DEMO / "draft").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added.append({**added[0], "id": 4096, "content": "<another>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert draft_translation(config_from_keys({"draft.path": str(other)}, {})) is None
