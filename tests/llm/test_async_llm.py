"""`AsyncLLM`: concurrent requests share rounds, fail alone, and are cancelled when left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from specserve import AsyncLLM, Sampling
from specserve.errors import EmptyPrompt, Overloaded, SpecserveError, WorkerLost
from specserve.types import Verdict, VerifyStep
from tests.llm.test_llm import TEXT, ScriptedTarget, scripted


def record_batches(target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    verify = target.verify

    def recording(steps: Sequence[VerifyStep]) -> list[Verdict]:
        sizes.append(len(steps))
        return verify(steps)

    monkeypatch.setattr(target, "verify", recording)
    return sizes


def hold_after_first_pass(
    target: ScriptedTarget, monkeypatch: pytest.MonkeyPatch
) -> threading.Event:
    """Let every pass but the first wait for the event: a text cannot end before it is set."""
    freed = threading.Event()
    verify = target.verify
    passes = 0

    def waiting(steps: Sequence[VerifyStep]) -> list[Verdict]:
        nonlocal passes
        passes += 1
        if passes > 1:
            freed.wait()
        return verify(steps)

    monkeypatch.setattr(target, "verify", waiting)
    return freed


async def text_of(llm: AsyncLLM, prompt: str, sampling: Sampling) -> str:
    return "".join([delta.text async for delta in llm.stream(prompt, sampling)])


def test_concurrent_requests_share_rounds_and_each_gets_its_own_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, target = scripted(lambda length: f"after {length} {TEXT}", gamma=2)
    sizes = record_batches(target, monkeypatch)

    async def main() -> list[str]:
        async with AsyncLLM.from_llm(llm) as served:
            prompts = ["a" * length for length in range(1, 41)]
            requests = (text_of(served, prompt, Sampling(max_tokens=500)) for prompt in prompts)
            texts = await asyncio.gather(*requests)
            while len(target.released) < 40:  # pages are released by the round after a text's last
                await asyncio.sleep(0.001)
            return texts

    assert asyncio.run(main()) == [f"after {length} {TEXT}" for length in range(1, 41)]
    assert max(sizes) > 10


def test_more_requests_than_the_queue_holds_are_all_answered() -> None:
    llm, _ = scripted("01", **{"limits.max_running": 2, "limits.max_queued": 1})

    async def main() -> list[str]:
        async with AsyncLLM.from_llm(llm) as served:
            outputs = await asyncio.gather(*(served.generate("a") for _ in range(20)))
            return [output.text for output in outputs]

    assert asyncio.run(main()) == ["01"] * 20


def test_the_error_of_a_request_is_raised_to_it_and_to_no_other() -> None:
    llm, _ = scripted("ok")

    async def main() -> list[object]:
        async with AsyncLLM.from_llm(llm) as served:
            calls = [served.generate("a"), served.generate(""), served.generate([1] * 1000)]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    good, empty, long = asyncio.run(main())
    assert getattr(good, "text", None) == "ok"
    assert isinstance(empty, EmptyPrompt)
    assert isinstance(long, SpecserveError)


def test_a_failing_target_is_an_error_of_its_requests_and_later_ones_work() -> None:
    llm, target = scripted("ok")
    target.fails_at = 2

    async def main() -> str:
        async with AsyncLLM.from_llm(llm) as served:
            with pytest.raises(WorkerLost, match="the card fell out"):
                await served.generate("ab")
            return (await served.generate("a")).text

    assert asyncio.run(main()) == "ok"


def test_a_stream_that_is_closed_is_cancelled_and_frees_its_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, target = scripted("0123456789" * 90, gamma=0)
    sizes = record_batches(target, monkeypatch)
    freed = hold_after_first_pass(target, monkeypatch)

    async def main() -> None:
        async with AsyncLLM.from_llm(llm) as served:
            stream = served.stream("a", Sampling(max_tokens=900))
            assert (await anext(stream)).text
            await stream.aclose()
            freed.set()
            other = await served.generate("a", Sampling(max_tokens=3))
            assert other.text == "012"
            while len(target.released) < 2:  # the last round releases
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert sum(sizes) < 10


def test_what_is_under_way_when_it_closes_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, target = scripted("0123456789" * 90, gamma=0)
    freed = hold_after_first_pass(target, monkeypatch)

    async def main() -> None:
        served = AsyncLLM.from_llm(llm)
        stream = served.stream("a", Sampling(max_tokens=900))
        await anext(stream)
        closing = asyncio.create_task(served.close())
        while not served._rounds._closed:
            await asyncio.sleep(0.001)
        freed.set()
        await closing
        with pytest.raises(Overloaded, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(Overloaded, match="closed"):
            await served.generate("a")

    asyncio.run(main())
