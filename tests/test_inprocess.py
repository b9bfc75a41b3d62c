"""From paths to an engine that writes, with tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from specserve import LLM, Sampling
from specserve.errors import ConfigError, ModelError, ModelNotFound, TokenizerMismatch
from tests.support.checkpoints import add_tokenizer, make, perturbed

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9]]
SMALL = {
    "target.dtype": "float32",
    "draft.dtype": "float32",
    "target.threads": 1,
    "cache.pages": 60,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    target = make("llama", root / "target")
    add_tokenizer(target)
    return target, perturbed(target, root / "draft", 0.2)


def library_greedy(target: Path, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("gamma", [0, 1, 5, "auto"])
def test_a_target_and_its_draft_write_what_the_library_writes(pair, gamma):
    target, draft = pair
    with LLM(target, draft, **SMALL, **{"speculation.gamma": gamma}) as llm:
        outputs = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=24, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [
        library_greedy(target, prompt, 24) for prompt in PROMPTS
    ]
    assert sum(output.stats.accepted for output in outputs) > 0 or gamma == 0


def test_without_a_draft_the_same_is_written(pair):
    with LLM(pair[0], **SMALL) as llm:
        (output,) = llm.generate(
            PROMPTS[:1], Sampling(temperature=0, max_tokens=8, ignore_eos=True)
        )
    assert output.token_ids == library_greedy(pair[0], PROMPTS[0], 8)
    assert output.stats.drafted == 0


def test_the_drafter_may_have_its_own_number_of_threads(pair):
    before = torch.get_num_threads()
    with LLM(
        *pair, **SMALL | {"target.threads": 2, "draft.threads": 1, "speculation.gamma": 2}
    ) as llm:
        llm.generate("ab", Sampling(max_tokens=3))
        assert torch.get_num_threads() == 2  # the target had the last word
    torch.set_num_threads(before)


def test_a_shorter_context_is_kept(pair):
    with LLM(pair[0], **SMALL | {"limits.max_context": 12}) as llm:
        (output,) = llm.generate([[7] * 8], Sampling(max_tokens=50, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


def refuse_to_open(*_: object, **__: object) -> None:
    pytest.fail("weights were read before the mistake was found")


def test_mistakes_are_found_before_any_weights_are_read(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("specserve.inprocess.open_rank", refuse_to_open)
    with pytest.raises(ConfigError, match=r"use `specserve serve --tp 2`"):
        LLM(pair[0], **{"target.tensor_parallel": 2})
    with pytest.raises(ModelNotFound):
        LLM(tmp_path / "missing" / "entirely")
    with pytest.raises(ModelNotFound):
        LLM(pair[0], tmp_path / "missing" / "entirely")


def test_a_draft_with_another_tokenizer_is_refused(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("specserve.inprocess.open_rank", refuse_to_open)
    other = perturbed(pair[0], tmp_path / "other", 0.0)
    file = other / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(file))
    with pytest.raises(TokenizerMismatch, match="'another' to the draft"):
        LLM(pair[0], other)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("specserve.inprocess.open_rank", refuse_to_open)
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        LLM(make("llama", tmp_path / "bare"))


def test_keys_of_the_config_are_checked_like_everywhere(pair):
    with pytest.raises(
        ConfigError, match=r"unknown key speculation\.gama; did you mean speculation\.gamma\?"
    ):
        LLM(pair[0], **{"speculation.gama": 5})
