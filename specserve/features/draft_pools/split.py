"""Draft for one engine on several devices of its pool, each sequence on one of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from typing import Protocol

from specserve.cluster.gateway.prefix_affinity import EngineState, PrefixAffinity
from specserve.types import Drafter, DraftStep, Proposal, Request

MAX_EXPECTED = 1 << 14
"""Requests whose prompts are kept until they begin; of older ones the first step is all."""


class Device(Drafter, Protocol):
    """A drafter on a device, which may be away for a while."""

    @property
    def is_away(self) -> bool: ...


class SplitDrafter:
    """A drafter whose rounds are drafted by several devices at once.

    A sequence stays where it is. It goes where its prefix is cached, unless another queue is
    shorter by more than that saves, by the rule by which gateways choose engines. The sequences of
    a device that is lost move to the others, which read them again.
    """

    def __init__(self, devices: Sequence[Device], affinity: PrefixAffinity | None = None) -> None:
        self._devices = tuple(devices)
        self._affinity = affinity or PrefixAffinity()
        self._chosen: dict[int, int] = {}  # device of each sequence
        self._num_sequences = [0] * len(devices)
        self._prompts = OrderedDict[int, tuple[int, ...]]()  # of sequences that have not begun

    def expect(self, seq_id: int, request: Request) -> None:
        """Note the whole prompt of a sequence, of which its first step may have only a part."""
        self._prompts[seq_id] = request.prompt + request.generated
        if len(self._prompts) > MAX_EXPECTED:
            self._prompts.popitem(last=False)

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        """Send each device its steps before returning; without steps, all send what they hold."""
        shares: list[list[DraftStep]] = [[] for _ in self._devices]
        for step in steps:
            shares[self._device_of(step)].append(step)
        calls = [
            device.propose(share, deadline)
            for device, share in zip(self._devices, shares, strict=True)
            if share or not steps
        ]
        return calls[0] if len(calls) == 1 else _in_order(steps, calls)

    async def release(self, seq_ids: Sequence[int]) -> None:
        """Release the sequences with the next message to their devices."""
        shares: list[list[int]] = [[] for _ in self._devices]
        for seq_id in seq_ids:
            self._prompts.pop(seq_id, None)
            if (number := self._leave(seq_id)) is not None:
                shares[number].append(seq_id)
        for device, share in zip(self._devices, shares, strict=True):
            if share:
                await device.release(share)

    def _device_of(self, step: DraftStep) -> int:
        """Return the device of a step. One that begins again may choose another."""
        number = self._chosen.get(step.seq_id)
        if number is None or (not step.start and self._devices[number].is_away):
            self._leave(step.seq_id)
            number = self._chosen[step.seq_id] = self._choose(step)
            self._num_sequences[number] += 1
        return number

    def _choose(self, step: DraftStep) -> int:
        prompt = self._prompts.pop(step.seq_id, step.tokens)
        states = {
            str(number): EngineState(count, max_running=count + 1)
            for number, count in enumerate(self._num_sequences)
        }
        present = {
            name: state for name, state in states.items() if not self._devices[int(name)].is_away
        }
        name = self._affinity.rank(prompt, step.policy.cache_salt, present or states)[0]
        self._affinity.record(name, prompt, step.policy.cache_salt, states[name])
        return int(name)

    def _leave(self, seq_id: int) -> int | None:
        """Count a sequence no longer on its device, which is returned."""
        if (number := self._chosen.pop(seq_id, None)) is not None:
            self._num_sequences[number] -= 1
        return number


async def _in_order(
    steps: Sequence[DraftStep], calls: Sequence[Awaitable[Sequence[Proposal]]]
) -> Sequence[Proposal]:
    """Return the proposals of all calls in the order of the steps, or raise once all have ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    found: dict[int, Proposal] = {}
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.update((proposal.seq_id, proposal) for proposal in answer)
    return [found[step.seq_id] for step in steps]
