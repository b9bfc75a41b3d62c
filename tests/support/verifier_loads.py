"""Simulated loads whose acceptance depends on the verifier, under the real coordinator."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.config.tree import SpeculationConfig, config_from_keys
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.branches import Fanout
from specserve.engine import Coordinator
from specserve.tools.simulate import clock
from specserve.tools.simulate.acceptance_model import VOCAB, AcceptanceConfig, AcceptanceModel
from specserve.tools.simulate.clock import DeviceClock
from specserve.tools.simulate.devices import (
    HostConfig,
    LockstepDrafter,
    SimulatedDrafter,
    SimulatedTarget,
)
from specserve.tools.simulate.draft_model import SimulatedDraftModel
from specserve.tools.simulate.pass_times import LinearPassTime
from specserve.tools.simulate.scenario import DeviceGroup
from specserve.types import Chunk, DraftStep, ModelInfo, Proposal, Request, Speculation, Warp


@dataclass(frozen=True, slots=True)
class VerifierLoad:
    """A closed loop of sampled requests, on devices of their own for target and draft."""

    acceptance: Mapping[str, AcceptanceConfig]  # by verifier
    anticipates: bool
    streams: int = 1
    requests: int = 100
    tokens: int = 128
    verify_seconds: float = 0.010
    draft_seconds: float = 0.002


@dataclass(slots=True)
class LoadResult:
    """The tokens a second of a load, and how many of its requests each verifier had."""

    rate: float = 0.0
    verifiers: Counter[str] = field(default_factory=Counter)


def run_load(load: VerifierLoad, verifier: str | None) -> LoadResult:
    """Answer all requests of a load with one verifier, or with the engine's choice."""
    return clock.run(_run(load, verifier))


class VerifierModel(AcceptanceModel):
    """Texts whose draft tokens are as good as the sequence's verifier makes them."""

    def __init__(self, by_verifier: Mapping[str, AcceptanceConfig]) -> None:
        super().__init__(0, next(iter(by_verifier.values())))
        self._models = {name: AcceptanceModel(0, own) for name, own in by_verifier.items()}
        self.verifiers: dict[int, str] = {}  # by sequence

    def verify(self, seq_id: int, start: int, drafts: Sequence[int]) -> tuple[int, int]:
        return self._of(seq_id).verify(seq_id, start, drafts)

    def draft_tokens(self, seq_id: int, start: int, stop: int, *, depth: int) -> list[int]:
        return self._of(seq_id).draft_tokens(seq_id, start, stop, depth=depth)

    def likeliest(
        self, seq_id: int, position: int, width: int, *, but: int | None
    ) -> tuple[int, ...]:
        return self._of(seq_id).likeliest(seq_id, position, width, but=but)

    def release(self, seq_ids: Sequence[int]) -> None:
        for model in self._models.values():
            model.release(seq_ids)

    def _of(self, seq_id: int) -> AcceptanceModel:
        return self._models[self.verifiers[seq_id]]


class _NotingDrafter:
    """A simulated drafter whose model learns each sequence's verifier from its first step."""

    def __init__(self, drafter: SimulatedDrafter, model: VerifierModel) -> None:
        self._drafter, self._model = drafter, model

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Awaitable[Sequence[Proposal]]:
        for step in steps:
            known = self._model.verifiers.setdefault(step.seq_id, step.policy.verifier)
            assert known == step.policy.verifier, "a sequence keeps its verifier"
        return self._drafter.propose(steps, deadline)

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self._drafter.release(seq_ids)


async def _run(load: VerifierLoad, verifier: str | None) -> LoadResult:
    result, loop, waiting = LoadResult(), asyncio.get_running_loop(), load.requests

    def submit() -> None:
        nonlocal waiting
        waiting -= 1
        speculation = Speculation(verifier=verifier)
        coordinator.submit(
            Request((0,), load.tokens, Warp(), 0, ignore_eos=True, speculation=speculation)
        )

    def emit(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.finish is not None:
                assert chunk.error is None
                assert chunk.stats is not None
                result.verifiers[chunk.stats.verifier] += 1
                if waiting:
                    submit()
                elif result.verifiers.total() == load.requests:
                    coordinator.close()

    coordinator = _coordinator(load, emit)
    for _ in range(load.streams):
        submit()
    await coordinator.run()
    result.rate = load.requests * load.tokens / loop.time()
    return result


def _coordinator(load: VerifierLoad, emit: Any) -> Coordinator:
    device, model = DeviceClock(), VerifierModel(load.acceptance)
    group = DeviceGroup(LinearPassTime(fixed=load.verify_seconds, per_row=1e-5))
    draft = SimulatedDraftModel(
        model, LinearPassTime(fixed=load.draft_seconds), device, pages=10**6, page_size=16
    )
    drafter = SimulatedDrafter(
        Anticipation(draft, Fanout(per_position=1), clock=device)
        if load.anticipates
        else LockstepDrafter(draft, device),
        device,
        model,
        link_s=0.0,
    )
    info = ModelInfo(VOCAB, 10_000, frozenset(), page_size=16, num_pages=10**6, curve=group.curve)
    return Coordinator(
        SimulatedTarget(model, group.pass_time, link_s=0.0, host=HostConfig()),
        _NotingDrafter(drafter, model),
        info=info,
        limits=config_from_keys({"limits.max_running": load.streams}).limits,
        speculation=SpeculationConfig(),
        emit=emit,
        clock=asyncio.get_running_loop().time,
        remote_workers=True,
    )
