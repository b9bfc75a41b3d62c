"""Adapters of engines in this process: one for each prompt of a call, checked before weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve import LLM, Sampling
from specserve.errors import AdapterError, NotServed
from tests.support.adapters import merge, write_adapter
from tests.support.checkpoints import add_tokenizer, make


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
