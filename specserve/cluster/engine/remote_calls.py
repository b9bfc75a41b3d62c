"""Calls to workers over their links: every failure is raised where the answer is awaited.

Knows no models and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn, TypeGuard, TypeVar

from specserve.cluster.transport.link import Client
from specserve.errors import SpecserveError, WorkerLost
from specserve.types import DraftStep, VerifyStep
from specserve.wire.messages import Message, Proposals, Propose, Verdicts, Verify

Answer = TypeVar("Answer", Verdicts, Proposals)


def send_call(worker: Client, message: Propose | Verify, timeout_s: float) -> Awaitable[Message]:
    """Send the message before returning. Whatever fails, and whenever, is raised when awaited."""
    try:
        return worker.call(message, timeout_s)
    except Exception as error:
        return failed(error)


async def expect_answer(kind: type[Answer], call: Awaitable[Message], who: str) -> Answer:
    answer = await call
    if not isinstance(answer, kind):
        raise WorkerLost(f"{who} answered a round with {type(answer).__name__}")
    return answer


async def all_answers(calls: Sequence[Coroutine[Any, Any, Verdicts]]) -> tuple[Verdicts, ...]:
    """Return the answers of all ranks; raise as soon as one fails."""
    if len(calls) == 1:
        return (await calls[0],)
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for rank, task in enumerate(tasks):
            error = task.exception() if task.done() else None
            if error is not None:
                raise WorkerLost(f"rank {rank} of {len(tasks)}: {reason_of(error)}") from error
        return tuple(task.result() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()


async def failed(error: Exception) -> NoReturn:
    raise error


def can_go_on(error: Exception) -> TypeGuard[SpecserveError]:
    """Return whether a worker said that it could not do this round, and can do others."""
    return isinstance(error, SpecserveError) and not isinstance(error, WorkerLost)


def reason_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def are_held(steps: Sequence[DraftStep] | Sequence[VerifyStep], held: AbstractSet[int]) -> bool:
    """Return whether each step starts at 0 or continues a sequence that the worker holds.

    Other steps build on a KV cache that was lost with an earlier worker.
    """
    return all(not step.start or step.seq_id in held for step in steps)
