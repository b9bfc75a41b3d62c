"""Engines in this process, opened from paths of tiny checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve import LLM, Sampling
from specserve.errors import (
    AdapterError,
    ConfigError,
    ModelError,
    ModelNotFound,
    NotServed,
)
from tests.support.adapters import merge, write_adapter
from tests.support.checkpoints import add_tokenizer, make, perturb

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9]]
SMALL: dict[str, Any] = {
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
    return target, perturb(target, root / "draft", 0.2)


def library_logprobs(target: Path, prompt: list[int]) -> torch.Tensor:  # [tokens - 1, vocab]
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1)


def test_an_output_has_the_library_s_logprobs_of_its_prompt(pair: tuple[Path, Path]) -> None:
    with LLM(*pair, **SMALL) as llm:
        llm.generate(PROMPTS, Sampling(max_tokens=2, temperature=0))  # the pages are cached now
        outputs = llm.generate(PROMPTS, Sampling(max_tokens=0, prompt_logprobs=3))
        (plain, echoed) = llm.generate(
            [PROMPTS[1]] * 2, [Sampling(logprobs=1), Sampling(logprobs=1, echo=True)]
        )
    assert plain.prompt_logprobs is None
    assert echoed.prompt_logprobs is not None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert (output.token_ids, output.finish_reason) == ((), "length")
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        rows = library_logprobs(pair[0], prompt)
        for token, row, found in zip(prompt[1:], rows, others, strict=True):
            assert found is not None
            assert found.token == pytest.approx(row[token].item(), abs=1e-4)
            assert found.top == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
            assert found.rank == int((row > row[token]).sum()) + 1


def library_greedy(target: Path, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("gamma", [0, 1, 5, "auto"])
def test_a_target_and_its_draft_write_what_the_library_writes(
    pair: tuple[Path, Path], gamma: int | str
) -> None:
    target, draft = pair
    with LLM(target, draft, **SMALL, **{"speculation.gamma": gamma}) as llm:
        outputs = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=24, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [
        library_greedy(target, prompt, 24) for prompt in PROMPTS
    ]
    assert sum(output.stats.accepted for output in outputs if output.stats) > 0 or gamma == 0


def test_without_a_draft_the_text_is_the_librarys_too(pair: tuple[Path, Path]) -> None:
    with LLM(pair[0], **SMALL) as llm:
        (output,) = llm.generate(
            PROMPTS[:1], Sampling(temperature=0, max_tokens=8, ignore_eos=True)
        )
    assert output.token_ids == library_greedy(pair[0], PROMPTS[0], 8)
    assert output.stats is not None
    assert output.stats.drafted == 0


def test_the_drafter_may_have_its_own_number_of_threads(pair: tuple[Path, Path]) -> None:
    before = torch.get_num_threads()
    with LLM(
        *pair, **SMALL | {"target.threads": 2, "draft.threads": 1, "speculation.gamma": 2}
    ) as llm:
        llm.generate("ab", Sampling(max_tokens=3))
        assert torch.get_num_threads() == 2  # the target ran last
    torch.set_num_threads(before)


def test_a_shorter_context_ends_the_text(pair: tuple[Path, Path]) -> None:
    with LLM(pair[0], **SMALL | {"limits.max_context": 12}) as llm:
        (output,) = llm.generate([[7] * 8], Sampling(max_tokens=50, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


def refuse_to_open(*_: object, **__: object) -> None:
    pytest.fail("weights were read before the mistake was found")


def test_mistakes_in_paths_are_raised_before_any_weights_are_read(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.llm.inprocess.open_target", refuse_to_open)
    with pytest.raises(ConfigError, match=r"use `specserve serve --tp 2`"):
        LLM(pair[0], **SMALL | {"target.tensor_parallel": 2})
    with pytest.raises(ModelNotFound):
        LLM(tmp_path / "missing" / "entirely")
    with pytest.raises(ModelNotFound):
        LLM(pair[0], tmp_path / "missing" / "entirely")


def test_a_checkpoint_without_a_tokenizer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.llm.inprocess.open_target", refuse_to_open)
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        LLM(make("llama", tmp_path / "bare"))


def test_an_unknown_key_is_an_error_with_the_nearest_known_name(pair: tuple[Path, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key speculation\.gama; did you mean speculation\.gamma\?"
    ):
        LLM(pair[0], **SMALL | {"speculation.gama": 5})


def test_prompts_of_one_call_have_adapters_of_their_own(tmp_path: Path) -> None:
    target = make("llama", tmp_path / "llama")
    add_tokenizer(target)
    adapter = write_adapter(target, tmp_path / "sql", strength=0.3)
    merged = merge(target, adapter, tmp_path / "merged")
    add_tokenizer(merged)
    prompt, plain = (5, 9, 200, 31), Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    keys: dict[str, Any] = {"target.dtype": "float32", "cache.pages": 60}
    with LLM(target=str(merged), **keys) as llm:
        (expected,) = llm.generate([prompt], plain)
    keys["adapters.paths"] = {"sql": adapter.path}
    with LLM(target=str(target), **keys) as llm:
        samplings = [plain, replace(plain, adapter="sql"), replace(plain, adapter="other")]
        own, adapted, unknown = llm.generate([prompt] * 3, samplings)
    assert adapted.token_ids == expected.token_ids != own.token_ids
    assert isinstance(unknown.error, NotServed)
    assert "has no adapter 'other'; it has sql" in str(unknown.error)


def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("specserve.llm.inprocess.open_target")
    target = make("llama", tmp_path / "llama")
    add_tokenizer(target)
    other = make("llama_four_kv_heads", tmp_path / "other")
    wider = write_adapter(other, tmp_path / "wider")
    huge = write_adapter(target, tmp_path / "huge", rank=4000, only="q_proj")
    for adapter, message in ((wider, "of another base model"), (huge, "is 1; raise it")):
        keys: dict[str, Any] = {"adapters.paths": {"own": adapter.path}, "adapters.memory_mb": 1}
        with pytest.raises(AdapterError, match=message):
            LLM(target=str(target), **keys)
