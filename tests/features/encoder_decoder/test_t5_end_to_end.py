"""An encoder-decoder from its directory to its answers: `LLM`, HTTP, and the errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specserve import LLM, Sampling
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import config_from_keys
from specserve.errors import BadValue, TooLong, UnsupportedModel
from tests.support.checkpoints import (
    CONTEXT,
    ENCODER_DECODERS,
    EOS,
    add_tokenizer,
    make,
    perturb,
    write,
)
from tests.support.engine_service import EngineService
from tests.support.engines import library_greedy_encoder_decoder
from tests.support.http_server import RunningServer, serving

SMALL: dict[str, Any] = {
    "target.dtype": "float32",
    "draft.dtype": "float32",
    "target.threads": 1,
    "cache.pages": 120,
    "cache.page_size": 16,
}
PROMPTS = ["translate this", "ab" * 40, "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("served")
    target = write(ENCODER_DECODERS["t5"](), root / "target")
    add_tokenizer(target, ends=True)
    return target, perturb(target, root / "draft", 0.02)


@pytest.fixture(scope="module")
def library_texts(pair: tuple[Path, Path]) -> list[tuple[int, ...]]:
    """Return what the library's own generate() writes."""
    tokenizer = Tokenizer.load(pair[0])
    return library_greedy_encoder_decoder(
        pair[0], [tokenizer.encode(prompt) for prompt in PROMPTS], max_tokens=12
    )


@pytest.mark.parametrize(
    "keys",
    [{}, {"speculation.gamma": 3}, {"draft.kind": "prompt_copy"}, {"draft.kind": "none"}],
    ids=str,
)
def test_an_llm_writes_what_the_library_writes(
    pair: tuple[Path, Path], library_texts: list[tuple[int, ...]], keys: dict[str, Any]
) -> None:
    target, draft = pair
    with LLM(target, None if "draft.kind" in keys else draft, **SMALL | keys) as llm:
        outputs = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=12))
        assert [output.token_ids for output in outputs] == library_texts
        assert all(output.prompt_token_ids[-1] == EOS for output in outputs)
        assert outputs[0].text == Tokenizer.load(target).decode(
            [token for token in library_texts[0] if token != EOS]
        )


def test_several_continuations_of_a_prompt_and_their_seeds(pair: tuple[Path, Path]) -> None:
    with LLM(*pair, **SMALL | {"speculation.gamma": 2}) as llm:
        sampling = Sampling(max_tokens=8, n=3, seed=5, ignore_eos=True)
        first, again = llm.generate(PROMPTS[0], sampling), llm.generate(PROMPTS[0], sampling)
    assert [output.token_ids for output in first] == [output.token_ids for output in again]
    assert len({output.token_ids for output in first}) == 3


def test_options_that_an_encoder_decoder_cannot_follow_are_errors(pair: tuple[Path, Path]) -> None:
    with LLM(pair[0], **SMALL) as llm:
        with pytest.raises(BadValue, match="echo is not for encoder-decoders"):
            llm.generate("abc", Sampling(echo=True))
        with pytest.raises(BadValue, match="prompt_logprobs is not for encoder-decoders"):
            llm.generate("abc", Sampling(prompt_logprobs=1))
        with pytest.raises(
            TooLong,
            match=f"the prompt has {CONTEXT + 1} tokens, but the encoder reads at most {CONTEXT}",
        ):
            llm.generate([[5] * (CONTEXT + 1)])
    with LLM(
        pair[0], **SMALL | {"limits.max_context": 2000}
    ) as llm:  # relative positions have no limit
        sampling = Sampling(max_tokens=2, ignore_eos=True)
        (output,) = llm.generate([[5] * (CONTEXT + 1)], sampling)
        assert len(output.token_ids) == 2


def test_target_and_draft_must_be_of_one_kind(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specserve.llm.inprocess.open_target",
        lambda *_: pytest.fail("weights were read before the mistake was found"),
    )
    llama = make("llama", tmp_path / "llama")
    add_tokenizer(llama)
    with pytest.raises(
        UnsupportedModel,
        match=r"draft\.path .* is an encoder-decoder, and the target .* is a decoder-only model",
    ):
        LLM(llama, pair[1])
    with pytest.raises(
        UnsupportedModel,
        match=r"draft\.path .* is a decoder-only model, and the target .* is an encoder-decoder",
    ):
        LLM(pair[0], llama)


def test_float16_is_an_error(pair: tuple[Path, Path]) -> None:
    with pytest.raises(
        UnsupportedModel, match="t5 models overflow in float16; use dtype bfloat16 or float32"
    ):
        LLM(pair[0], **SMALL | {"target.dtype": "float16"})


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[RunningServer]:
    config = config_from_keys(
        {}, SMALL | {"target.path": str(pair[0]), "draft.kind": "prompt_copy"}
    )
    with serving(
        EngineService(config),
        tokenizer=Tokenizer.load(pair[0]),
        is_encoder_decoder=True,
        max_context=100,
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_logprobs_of_an_encoder_input_are_refused(
    server: RunningServer, path: str, prompt: dict[str, object]
) -> None:
    reply = server.ask(path, {**prompt, "prompt_logprobs": 1, "max_tokens": 0})
    assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")
    assert "encoder-decoders" in str(reply.error["message"])


def test_usage_of_a_completion_counts_encoder_input_and_text_separately(
    server: RunningServer, library_texts: list[tuple[int, ...]]
) -> None:
    reply = server.ask(
        "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "logprobs": 1}
    )
    choice = reply.json["choices"][0]
    assert (len(choice["logprobs"]["tokens"]), choice["logprobs"]["text_offset"][0]) == (
        len(library_texts[0]),
        0,
    )
    num_prompt, num_generated = len(PROMPTS[0]) + 1, len(library_texts[0])
    assert reply.json["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_goes_through_the_plain_template(server: RunningServer) -> None:
    reply = server.ask(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    )
    assert reply.status == 200
    usage = reply.json["usage"]
    assert usage["prompt_tokens"] == len("user: hi\nassistant:") + 1
    assert usage["completion_tokens"] == 99 or reply.json["choices"][0]["finish_reason"] == "stop"


def test_an_encoder_input_may_fill_the_context_and_no_more(server: RunningServer) -> None:
    assert server.ask("/v1/completions", {"prompt": [7] * 100, "max_tokens": 2}).status == 200
    long = server.ask("/v1/completions", {"prompt": [7] * 101, "max_tokens": 2})
    assert (long.status, long.error["param"]) == (400, "prompt")


def test_echo_is_refused_naming_the_parameter(server: RunningServer) -> None:
    reply = server.ask("/v1/completions", {"prompt": "abc", "echo": True})
    assert (reply.status, reply.error["param"]) == (400, "echo")
