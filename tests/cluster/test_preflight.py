"""Refusals of what cannot be served on this machine, before Ray starts and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from specserve.cluster.preflight import require_possible_here
from specserve.config.tree import config_from_keys
from specserve.errors import SpecserveError


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.cluster.preflight._num_gpus", lambda: 0)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target.path": "./nope"}, "target.path ./nope does not exist; give a directory"),
        ({"draft.path": "/nope"}, "draft.path /nope does not exist"),
        (
            {"draft.kind": "max_gram", "draft.path": "/nope"},
            "draft.path /nope does not exist; give what `specserve tables`",
        ),
        ({"target.tensor_parallel": 3}, "8 attention heads cannot be shared evenly by 3 ranks"),
        ({"target.device": "cuda"}, "needs 1 GPU (target-0 1), the cluster has 0"),
        ({"http.api_keys_file": "/nope"}, "http.api_keys_file /nope: it cannot be read"),
        ({"demo.size": "60B"}, "demo.size 60,000,000,000 takes 111.8 GiB of memory"),
        ({"cache.pages": 99_999_999}, "cache.pages 99,999,999 take 3051.8 GiB of memory or more"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_key(
    keys: Mapping[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.cluster.preflight.available_memory", lambda: 2**34)
    with pytest.raises(SpecserveError) as refused:
        require_possible_here(config_from_keys(keys))
    assert str(refused.value).startswith(message)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"target.path": "owner/model", "draft.path": "owner/draft"},
        {"target.tensor_parallel": 4, "cache.pages": 4096, "demo.size": "200M"},
        {"target.device": "cuda", "target.label_selector": {"disk": "models"}},
    ],
)
def test_what_may_be_served_passes(keys: Mapping[str, object]) -> None:
    require_possible_here(config_from_keys(keys))


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("text", ["no JSON", "[]", json.dumps({"num_attention_heads": "many"})])
def test_a_config_that_is_not_understood_is_left_to_the_full_check(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    keys = {"target.path": str(tmp_path), "target.tensor_parallel": 3, "cache.pages": 99_999_999}
    require_possible_here(config_from_keys(keys))


def test_it_needs_no_torch() -> None:
    code = "import sys, specserve.cluster.preflight; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
