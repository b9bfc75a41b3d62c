"""Engines in this process, opened from paths of tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve import LLM, Sampling
from specserve.errors import ConfigError, ModelError, ModelNotFound
from specserve.llm import inprocess
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


@pytest.mark.parametrize(("batch", "cached"), [("auto", [0, 48, 80]), (22, [0, 30, 60])])
def test_a_later_turn_reports_what_the_prefix_cache_has_of_it(
    pair: tuple[Path, Path], batch: int | str, cached: list[int]
) -> None:
    """Whole pages of 16, also of the answers; where chunks end within pages, their rest."""
    sampling = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
    prompt, found = list(range(5, 45)), []
    keys: dict[str, Any] = {"speculation.gamma": 3, "limits.max_batch_tokens": batch}
    with LLM(pair[0], pair[1], **SMALL, **keys) as llm:
        for _ in range(3):
            (output,) = llm.generate([prompt], sampling)
            assert output.stats is not None
            found.append(output.stats.cached_tokens)
            prompt += [*output.token_ids, 7, 8]
    assert found == cached


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


def test_a_model_takes_no_more_threads_than_its_container_has_cores(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "usable_cores", lambda: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with LLM(
        pair[0], **{key: value for key, value in SMALL.items() if "threads" not in key}
    ) as llm:
        llm.generate("ab", Sampling(max_tokens=3))
        assert torch.get_num_threads() == 1
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
