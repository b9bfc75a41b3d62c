"""`LLM.stream`, `LLM.chat` and the progress bar, over scripted workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specserve import Sampling
from specserve.errors import BadValue, EmptyPrompt, WorkerLost
from tests.llm.test_llm import TEXT, byte_tokenizer, scripted


@pytest.mark.parametrize("gamma", [None, 3])
@pytest.mark.parametrize("stop", [None, "END", "日"])
def test_the_deltas_of_a_stream_are_the_output_of_generate(
    gamma: int | None, stop: str | None
) -> None:
    llm, target = scripted(TEXT, gamma=gamma)
    sampling = Sampling(max_tokens=500, stop=stop, logprobs=0)
    (whole,) = llm.generate("abc", sampling)
    deltas = list(llm.stream("abc", sampling))
    assert len(deltas) > 3
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert [delta.finish for delta in deltas if delta.finish is not None] == ["stop"]
    assert deltas[-1].finish == "stop"
    assert target.released == {0, 1}


def test_a_stream_that_is_left_is_cancelled_and_holds_nothing_in_the_next_call() -> None:
    llm, target = scripted("0123456789", gamma=0)
    stream = llm.stream("a", Sampling(max_tokens=10))
    assert next(stream).text == "0"
    stream.close()
    assert llm.generate("a", Sampling(max_tokens=3))[0].text == "012"
    assert target.released == {0, 1}


def test_calls_between_two_deltas_lose_nothing_of_a_stream() -> None:
    llm, _ = scripted("0123456789", gamma=0)
    first, second = (llm.stream("a", Sampling(max_tokens=10)) for _ in range(2))
    text = next(first).text
    assert llm.generate("a", Sampling(max_tokens=5))[0].text == "01234"
    assert "".join(delta.text for delta in second) == "0123456789"
    assert text + "".join(delta.text for delta in first) == "0123456789"


def test_errors_of_a_stream_are_raised() -> None:
    llm, target = scripted("ok")
    with pytest.raises(EmptyPrompt):
        next(llm.stream(""))
    with pytest.raises(BadValue, match="n is 2"):
        next(llm.stream("a", Sampling(n=2)))
    target.fails_at = 2
    with pytest.raises(WorkerLost, match="the card fell out"):
        list(llm.stream("ab"))


@pytest.mark.parametrize("messages", [[], {}, None, 5, "hello", [[]], [None], {"role": "user"}])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    llm, _ = scripted("fine")
    with pytest.raises(BadValue, match="a conversation or a list of them"):
        llm.chat(messages)


@pytest.mark.parametrize("ids", [np.array([97, 98]), torch.tensor([97, 98]), (97, 98)], ids=type)
def test_arrays_and_tensors_of_ids_are_prompts(ids: Any) -> None:
    llm, _ = scripted("fine")
    (alone,) = llm.generate(ids)
    assert (alone.text, alone.prompt_token_ids) == ("fine", (97, 98))
    assert [output.text for output in llm.generate([ids, "ab"])] == ["fine"] * 2


@pytest.mark.parametrize("prompt", [np.array(97), torch.tensor(97), {97, 98}, {97: 98}], ids=type)
def test_what_is_neither_text_nor_ids_fails_alone(prompt: Any) -> None:
    llm, _ = scripted("fine")
    good, bad = llm.generate(["ab", prompt])
    assert good.text == "fine"
    assert isinstance(bad.error, BadValue)


def test_a_chat_is_answered_by_its_template_alone_or_with_others() -> None:
    llm, _ = scripted(lambda length: f"after {length}")
    chat = [{"role": "user", "content": "hello"}]
    prompt = byte_tokenizer().apply_chat_template(chat)
    sampling = Sampling(max_tokens=50)
    (alone,) = llm.chat(chat, sampling)
    assert (alone.prompt_token_ids, alone.text) == (prompt, f"after {len(prompt)}")
    assert [output.text for output in llm.chat([chat, chat], sampling)] == [alone.text] * 2
    bad: Any = [{"role": "user"}]
    with pytest.raises(BadValue, match=r"messages\[0\]"):
        llm.chat(bad)


def test_a_progress_bar_counts_prompts_on_stderr_only_if_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm, _ = scripted("01")
    llm.generate(["a", "b"])
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b", "c"], progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "prompts, 100%, 3 of 3" in shown.err
