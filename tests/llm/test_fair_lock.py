"""Threads that take turns, at a lock and at one `LLM`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from specserve import Sampling
from specserve.llm.fair_lock import FairLock
from specserve.llm.llm import chat_prompts
from specserve.types import Verdict, VerifyStep
from tests.llm.test_llm import scripted

PATIENCE_S = 60.0


def test_who_asks_again_waits_for_who_asked_before() -> None:
    lock, order = FairLock(), list[str]()

    def other() -> None:
        with lock:
            order.append("other")

    with lock:
        thread = threading.Thread(target=other)
        thread.start()
        end = time.monotonic() + PATIENCE_S
        while not lock._queue.locked():
            assert time.monotonic() < end
            time.sleep(0.001)
        order.append("first")
    with lock:
        order.append("again")
    thread.join()
    assert order == ["first", "other", "again"]


def test_a_turn_within_a_turn_and_after_an_error_is_had_at_once() -> None:
    lock = FairLock()
    try:
        with lock, lock:
            raise RuntimeError
    except RuntimeError:
        pass
    with ThreadPoolExecutor(1) as other:

        def take() -> str:
            with lock:
                return "taken"

        assert other.submit(take).result(PATIENCE_S) == "taken"


def test_many_threads_get_each_its_own_text_from_one_llm() -> None:
    llm, target = scripted("0123456789" * 3)
    verify, running = target.verify, threading.Lock()

    def alone(steps: Sequence[VerifyStep]) -> list[Verdict]:
        assert running.acquire(blocking=False), "two rounds at once"
        try:
            time.sleep(0)  # another thread may run
            return verify(steps)
        finally:
            running.release()

    target.verify = alone  # type: ignore[method-assign]

    def texts(thread: int) -> list[str]:
        sampling = Sampling(max_tokens=3 + thread)
        streamed = "".join(delta.text for delta in llm.stream("a" * (thread + 1), sampling))
        outputs = llm.generate(["b", "cc"] * 3, sampling)
        return [streamed, *(output.text for output in outputs)]

    with ThreadPoolExecutor(6) as threads:
        for thread, found in enumerate(threads.map(texts, range(6))):
            assert set(found) == {("0123456789" * 3)[: 3 + thread]}
    llm.close()


def test_a_prompt_is_tokenized_while_a_round_runs() -> None:
    """An event loop that hands prompts to `AsyncLLM` must not wait for rounds."""
    llm, _ = scripted("fine")
    chat = [{"role": "user", "content": "hello"}]
    with llm.engine.lock, ThreadPoolExecutor(1) as loop:
        loop.submit(llm.engine.continuations, "ab", Sampling()).result(PATIENCE_S)
        loop.submit(chat_prompts, llm.engine, chat).result(PATIENCE_S)
