"""The sampling that a checkpoint recommends, from its file to the texts that it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specserve import LLM, Sampling
from specserve.cli.main import main
from specserve.config.sections import TargetConfig
from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.generation_config import sampling_defaults
from tests.support.checkpoints import add_tokenizer, make

SMALL: dict[str, Any] = {"cache.pages": 90, "target.threads": 1}


def checkpoint(directory: Path, stated: object) -> Path:
    """Make a checkpoint that recommends what is `stated`."""
    made = make("llama", directory)
    add_tokenizer(made)
    (made / "generation_config.json").write_text(json.dumps(stated))
    return made


def test_what_the_file_says_of_sampling_is_read_and_nothing_else(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, TargetConfig()) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps(
            {"temperature": 0.6, "top_p": 1, "top_k": None, "do_sample": True, "eos_token_id": 2}
        )
    )
    assert sampling_defaults(tmp_path, TargetConfig()) == {"temperature": 0.6, "top_p": 1.0}


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ('{"temperature": "hot"}', "temperature"),
        ('{"top_p": 0}', "top_p"),
        ('{"top_k": 1.5}', "top_k"),
    ],
)
def test_what_no_request_could_have_is_refused(tmp_path: Path, stated: str, named: str) -> None:
    (tmp_path / "generation_config.json").write_text(stated)
    with pytest.raises(UnsupportedModel, match=named) as refused:
        sampling_defaults(tmp_path, TargetConfig())
    assert "generation_config.json" in str(refused.value)
    assert "target.sampling_defaults" in str(refused.value)
    assert sampling_defaults(tmp_path, TargetConfig(sampling_defaults="none")) == {}


@pytest.mark.parametrize(
    ("text", "named"), [('["temperature"]', "is a list"), ('{"temperature": ', "is no JSON")]
)
def test_a_file_that_is_no_object_is_refused_by_its_name(
    tmp_path: Path, text: str, named: str
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=rf"{tmp_path}: generation_config\.json {named}"):
        sampling_defaults(tmp_path, TargetConfig())


def test_calls_without_sampling_are_as_the_checkpoint_recommends(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", {"temperature": 0, "repetition_penalty": 1.5})
    with LLM(target, **SMALL) as llm:
        recommended = Sampling(temperature=0, repetition_penalty=1.5)
        assert llm.default_sampling == recommended
        assert llm.generate("ab")[0].text == llm.generate("ab", recommended)[0].text
    with LLM(target, **SMALL, **{"target.sampling_defaults": "none"}) as llm:
        assert llm.default_sampling == Sampling()


def test_a_command_without_a_temperature_has_the_checkpoint_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = checkpoint(tmp_path / "target", {"temperature": 0, "repetition_penalty": 1.5})
    words = ["generate", "--prompt", "ab", "--target", str(target), "--max-tokens", "12"]
    for key, value in SMALL.items():
        words += ["--set", f"{key}={value}"]
    assert main(words) == 0
    recommended = capsys.readouterr().out
    with LLM(target, **SMALL) as llm:
        sampling = Sampling(temperature=0, repetition_penalty=1.5, max_tokens=12)
        assert recommended.strip() == llm.generate("ab", sampling)[0].text.strip()
