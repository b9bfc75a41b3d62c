"""`LLM.generate` over scripted workers: texts, stops, errors, and what it leaves behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specserve
from specserve import LLM, Sampling
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import config_from_keys
from specserve.errors import BadValue, EmptyPrompt, Overloaded, TooLong, UnknownToken, WorkerLost
from specserve.llm.inprocess import EngineParts, LocalDrafter, LocalTarget
from specserve.types import DraftStep, Logprobs, ModelInfo, Proposal, TokenRule, Verdict, VerifyStep

END = 256
Script = Callable[[int], str]  # the text that follows a prompt of that many bytes


@cache
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    fast: Any = PreTrainedTokenizerFast
    return Tokenizer(fast(tokenizer_object=tokenizer, eos_token="<end>"))


class ScriptedTarget:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.fails_at: int | None = None  # the length of the prompt whose batch fails
        self.released: set[int] = set()

    def token(self, prompt_length: int, position: int) -> int:
        ids = (*byte_tokenizer().encode(self.script(prompt_length)), END)
        return ids[position - prompt_length]

    def verify(self, steps: Sequence[VerifyStep]) -> list[Verdict]:
        if any(step.policy.prompt_length == self.fails_at for step in steps):
            raise RuntimeError("the card fell out")
        return [self._verdict(step) for step in steps if step.needs_verdict]

    def _verdict(self, step: VerifyStep) -> Verdict:
        start, length = step.stop, step.policy.prompt_length
        right = [self.token(length, start + i) == draft for i, draft in enumerate(step.drafts)]
        accepted = [*right, False].index(False)
        logprobs = tuple(Logprobs(-float(start + i), (), ()) for i in range(accepted + 1))
        return Verdict(
            step.seq_id,
            accepted,
            self.token(length, start + accepted),
            logprobs if step.policy.logprobs is not None else None,
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        self.released |= set(seq_ids)


class ScriptedDrafter:
    def __init__(self, target: ScriptedTarget, script_length: int) -> None:
        self.target, self.length = target, script_length

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> list[Proposal]:
        return [self._draft(step) for step in steps]

    def _draft(self, step: DraftStep) -> Proposal:
        start, prompt = step.stop, step.policy.prompt_length
        stop = min(start + step.gamma, prompt + self.length)
        return Proposal(
            step.seq_id,
            start,
            tuple(self.target.token(prompt, i) for i in range(start, stop)),
            None,
            num_cached=max(start, stop - 1),
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        pass


def scripted(
    script: str | Script, *, gamma: int | None = 3, context: int = 1000, **keys: object
) -> tuple[LLM, ScriptedTarget]:
    text_after = script if callable(script) else lambda _: script
    target = ScriptedTarget(text_after)
    drafter = (
        None
        if gamma is None
        else LocalDrafter(
            ScriptedDrafter(
                target, min(len(byte_tokenizer().encode(text_after(n))) for n in range(1, 9))
            )
        )
    )
    info = ModelInfo(
        vocab_size=257, max_context=context, end_ids=frozenset([END]), page_size=4, num_pages=1000
    )
    return LLM.from_parts(
        EngineParts(byte_tokenizer(), LocalTarget(target), info, drafter),
        config_from_keys({}, keys | {"speculation.gamma": gamma}),
    ), target


TEXT = "Grüße aus 日本! 👩‍👩‍👧‍👦 the END of it. And more."


@pytest.mark.parametrize("gamma", [None, 0, 1, 3, 16])
def test_a_text_comes_whole_and_ends_with_its_end_token_left_out(gamma: int | None) -> None:
    llm, target = scripted(TEXT, gamma=gamma)
    (output,) = llm.generate("abc", Sampling(max_tokens=500))
    assert output.text == TEXT
    assert output.token_ids == (*byte_tokenizer().encode(TEXT), END)
    assert (output.finish_reason, output.index, output.error, output.logprobs) == (
        "stop",
        0,
        None,
        None,
    )
    assert output.prompt_token_ids == byte_tokenizer().encode("abc")
    assert output.stats is not None
    assert output.stats.accepted > 10 if gamma else output.stats.drafted == 0
    assert target.released == {0}


@pytest.mark.parametrize("gamma", [0, 1, 5, 16])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [("END", "the "), (["it", "END"], "the "), ("日", "Grüße aus "), ("G", ""), ("absent", None)],
)
def test_a_stop_string_ends_text_and_tokens_whatever_gamma(
    gamma: int, stop: str | list[str], expected: str | None
) -> None:
    llm, target = scripted(TEXT, gamma=gamma)
    (output,) = llm.generate("abc", Sampling(max_tokens=500, stop=stop, logprobs=0))
    if expected is None:
        assert output.text == TEXT
        return
    whole = byte_tokenizer().encode(TEXT)
    matched = "END" if isinstance(stop, list) else stop
    assert output.logprobs is not None
    assert output.text == TEXT[: TEXT.index(matched)]
    assert output.text.endswith(expected)
    assert output.token_ids == whole[: len(byte_tokenizer().encode(output.text + matched))]
    assert len(output.logprobs) == len(output.token_ids)
    assert output.finish_reason == "stop"
    assert output.stats is not None
    assert target.released == {0}


def test_a_text_cut_at_max_tokens_says_so() -> None:
    llm, _ = scripted(TEXT, gamma=5)
    (output,) = llm.generate("abc", Sampling(max_tokens=7, logprobs=1))
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("Grüße", "length", 7)
    assert output.logprobs is not None
    assert [logprob.token for logprob in output.logprobs] == [-float(3 + i) for i in range(7)]


def test_the_beginning_of_a_stop_string_at_the_end_is_not_lost() -> None:
    llm, _ = scripted("the EN", gamma=2)
    assert llm.generate("abc", Sampling(max_tokens=50, stop="END"))[0].text == "the EN"


def test_a_stop_token_is_left_out_of_the_text_and_ignored_ends_are_not() -> None:
    llm, _ = scripted("ab.cd")
    dot = byte_tokenizer().encode(".")[0]
    (output,) = llm.generate("x", Sampling(stop_token_ids=[dot]))
    assert (output.text, output.token_ids[-1], output.finish_reason) == ("ab", dot, "stop")
    (output,) = llm.generate("x", Sampling(ignore_eos=True, max_tokens=6))
    assert (output.text, output.token_ids[-1], output.finish_reason) == ("ab.cd", END, "length")


def test_prompts_are_text_or_ids_alone_or_together() -> None:
    llm, _ = scripted(lambda length: f"after {length}")
    sampling = Sampling(max_tokens=50)
    prompts: list[Any] = ["ab", [1, 2, 3], (4,)]
    assert [output.text for output in llm.generate(prompts, sampling)] == [
        "after 2",
        "after 3",
        "after 1",
    ]
    assert [output.text for output in llm.generate([1, 2, 3, 4], sampling)] == ["after 4"]
    assert [output.text for output in llm.generate("a", [sampling])] == ["after 1"]
    assert llm.generate([]) == []


def test_prompts_share_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, target = scripted("some text", gamma=0)
    sizes: list[int] = []
    verify = target.verify

    def recording(steps: Sequence[VerifyStep]) -> list[Verdict]:
        sizes.append(len(steps))
        return verify(steps)

    monkeypatch.setattr(target, "verify", recording)
    llm.generate(["a", "b", "c"], Sampling(max_tokens=4))
    assert max(sizes) == 3


def test_each_prompt_may_have_its_own_sampling() -> None:
    llm, _ = scripted("0123456789")
    short, long = llm.generate(["a", "b"], [Sampling(max_tokens=2), Sampling(max_tokens=5)])
    assert (short.text, long.text) == ("01", "01234")


def test_n_gives_that_many_outputs_in_order() -> None:
    llm, _ = scripted("0123456789")
    outputs = llm.generate(["a", "bc"], Sampling(max_tokens=2, n=3))
    assert [(len(output.prompt_token_ids), output.index) for output in outputs] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


def test_echo_puts_the_prompt_in_front() -> None:
    llm, _ = scripted("0123")
    prompts: list[Any] = ["日a", byte_tokenizer().encode("ü")]
    outputs = llm.generate(prompts, Sampling(max_tokens=2, echo=True, stop="ü"))
    assert [output.text for output in outputs] == ["日a01", "ü01"]
    assert [len(output.token_ids) for output in outputs] == [2, 2]


def test_echo_does_not_repeat_a_character_that_the_prompt_begins_and_the_text_ends() -> None:
    llm, _ = scripted("0123")
    begun = byte_tokenizer().encode("xü")[:-1]
    (output,) = llm.generate([begun], Sampling(max_tokens=2, echo=True))
    assert output.text == "x\N{REPLACEMENT CHARACTER}01"
    assert "".join(
        delta.text for delta in llm.stream(begun, Sampling(max_tokens=2, echo=True))
    ) == (output.text)


def test_more_prompts_than_the_queue_holds_are_all_answered() -> None:
    llm, _ = scripted("01", **{"limits.max_running": 2, "limits.max_queued": 1})
    assert [output.text for output in llm.generate(["a"] * 20)] == ["01"] * 20


FAULTY: list[tuple[Any, type[Exception]]] = [
    ("", EmptyPrompt),
    ([1, 999], UnknownToken),
    ([-1], UnknownToken),
    ([1] * 1000, TooLong),
    ([1.5], BadValue),
    (None, BadValue),
    ("\ud800", BadValue),
]


@pytest.mark.parametrize(("prompt", "kind"), FAULTY)
def test_a_faulty_prompt_fails_alone(prompt: Any, kind: type[Exception]) -> None:
    llm, target = scripted("ok")
    good, bad, also_good = llm.generate(["a", prompt, "b"])
    assert (good.text, also_good.text) == ("ok", "ok")
    assert (bad.text, bad.token_ids, bad.finish_reason) == ("", (), "error")
    assert isinstance(bad.error, kind)
    assert len(target.released) == 2


@pytest.mark.parametrize(("prompt", "kind"), FAULTY)
def test_when_all_are_faulty_the_first_error_is_raised(prompt: Any, kind: type[Exception]) -> None:
    llm, _ = scripted("ok")
    with pytest.raises(kind):
        llm.generate([prompt, ""])


def test_parameters_that_only_the_engine_can_check_fail_alone_too() -> None:
    llm, _ = scripted("ok")
    outputs = llm.generate(
        ["a", "b", "c"],
        [Sampling(), Sampling(speculation={"gamma": 17}), Sampling(logit_bias={257: 1})],
    )
    assert [type(output.error) for output in outputs] == [type(None), BadValue, BadValue]
    error = outputs[2].error
    assert error is not None
    assert error.param == "logit_bias"


def test_rules_that_only_the_model_can_check_fail_alone_too() -> None:
    llm, _ = scripted("ok")
    outputs = llm.generate(
        ["a", "b", "c", "d"],
        [
            Sampling(min_tokens=1, allowed_token_ids=[65, END]),
            Sampling(min_tokens=1, allowed_token_ids=[END]),
            Sampling(allowed_token_ids=[257]),
            Sampling(bad_words=["A"], allowed_token_ids=[byte_tokenizer().encode("A")[0]]),
        ],
    )
    params = [None if one.error is None else getattr(one.error, "param", "") for one in outputs]
    assert params == [None, *["allowed_token_ids"] * 3]


def test_the_target_gets_bad_words_as_tokens_and_the_end_tokens_of_min_tokens() -> None:
    llm, target = scripted("ok")
    rules: list[TokenRule | None] = []
    verify = target.verify

    def record(steps: Sequence[VerifyStep]) -> list[Verdict]:
        rules.extend(step.policy.warp.rule for step in steps)
        return verify(steps)

    target.verify = record  # type: ignore[method-assign]
    llm.generate("a", Sampling(n=2, min_tokens=2, stop_token_ids=[7], bad_words=["so"]))
    words = tuple(byte_tokenizer().encode(text) for text in ("so", " so"))
    assert set(rules) == {TokenRule(2, (7, END), words)}


def test_a_stop_string_is_text_up_to_min_tokens() -> None:
    llm, _ = scripted("a.b.c.d")
    texts = [
        llm.generate("x", Sampling(stop=".", min_tokens=least))[0].text for least in (0, 2, 3, 6)
    ]
    assert texts == ["a", "a.b", "a.b", "a.b.c.d"]


def test_a_failure_of_the_target_is_the_error_of_its_batch_and_the_next_call_works() -> None:
    llm, target = scripted("ok")
    target.fails_at = 2
    with pytest.raises(WorkerLost, match="the card fell out"):
        llm.generate("ab")
    assert llm.generate("a")[0].text == "ok"


def test_a_target_that_fails_every_pass_is_the_error_of_all_prompts_and_the_next_call_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, target = scripted("ok", **{"limits.max_running": 2, "limits.max_queued": 2})
    num_passes = 0

    def fail(steps: Sequence[VerifyStep]) -> list[Verdict]:
        nonlocal num_passes
        num_passes += bool(steps)
        raise RuntimeError("the card fell out")

    with monkeypatch.context() as patch:
        patch.setattr(target, "verify", fail)
        with pytest.raises(WorkerLost, match="no progress in 3 rounds: the card fell out"):
            llm.generate(["a", "b", "c", "d", "e", "f"])
    assert num_passes == 3
    assert llm.generate("a")[0].text == "ok"


@pytest.mark.parametrize("sampling", [5, [Sampling()], ["a", "b"], {"max_tokens": 3}])
def test_sampling_that_does_not_fit_the_prompts_is_an_error(sampling: Any) -> None:
    llm, _ = scripted("ok")
    with pytest.raises(BadValue, match="sampling"):
        llm.generate(["a", "b"], sampling)


@pytest.mark.parametrize("prompts", [5, None, {"a": 1}, b"bytes"])
def test_prompts_of_a_wrong_type_are_an_error(prompts: Any) -> None:
    llm, _ = scripted("ok")
    with pytest.raises(BadValue, match="prompt"):
        llm.generate(prompts)


def test_an_interrupted_call_leaves_no_sequence_running(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, target = scripted("0123456789", gamma=0)
    verify, calls = target.verify, iter(range(100))

    def interrupted(steps: Sequence[VerifyStep]) -> list[Verdict]:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return verify(steps)

    monkeypatch.setattr(target, "verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "d"], Sampling(max_tokens=10))
    assert llm.generate("a", Sampling(max_tokens=10))[0].text == "0123456789"
    assert target.released == {0, 1, 2}


def test_after_its_with_an_llm_is_closed() -> None:
    llm, _ = scripted("ok")
    with llm as same:
        assert same is llm
        assert llm.generate("a")[0].text == "ok"
    with pytest.raises(Overloaded, match="closed"):
        llm.generate("a")


def test_the_same_call_works_inside_a_running_event_loop() -> None:
    llm, _ = scripted("ok")

    async def notebook() -> str:
        return llm.generate("a")[0].text

    assert asyncio.run(notebook()) == "ok"


def test_importing_llm_does_not_wait_for_torch_transformers_or_ray() -> None:
    program = """
import sys
from specserve import LLM, AsyncLLM, Output, Sampling
print(*{"torch", "transformers", "ray"} & sys.modules.keys())
"""
    root = Path(specserve.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.split() == []
