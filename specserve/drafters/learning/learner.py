"""A learning draft, trained on what is served: train a copy, compare, swap, and keep or drop.

Text never changes: the target verifies every draft token, and q is what it was drawn from, whatever
weights computed it. Knows no target.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.drafters.learning.acceptance import (
    MEASURED_TOKENS,
    AcceptanceWindow,
    PendingProposals,
)
from specserve.drafters.learning.idle_time import IdleTime
from specserve.drafters.learning.served_texts import ServedTexts, Window
from specserve.drafters.learning.swap import SwappableDraft
from specserve.drafters.learning.trainer import DraftTrainer, Weights
from specserve.learning_progress import LearningProgress
from specserve.types import DraftStep, Proposal

log = logging.getLogger(__name__)

BUILD_POLL_S = 0.01
"""Time between two looks at a network that is being built."""
MAX_PATIENCE = 16
"""Weights are compared at most so many times as seldom after rollbacks."""


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """Conditions under which weights are compared, swapped and dropped."""

    min_windows: int = 32
    """Windows to learn from before the first step."""
    min_held_out: int = 8
    """Held-out windows that a comparison needs."""
    steps_between: int = 100
    """Updates of the weights between two comparisons."""
    epochs: int = 4
    """Times that a window is learned from, on average; then training waits for new ones."""
    min_gain: float = 0.01
    """Gain in nats a token of held-out windows for which weights are swapped."""
    num_errors: float = 2.0
    """Standard errors by which a gain or a loss must exceed chance."""
    measured_tokens: int = MEASURED_TOKENS
    """Verified draft tokens after a swap by which it is kept or rolled back."""


@dataclass(slots=True)
class _Comparison:
    """Held-out windows that are left to compare, and the gain of each that was."""

    windows: list[Window]
    served: list[float]
    trained: list[float]


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Network and weights before the latest swap, until its acceptance is measured."""

    network: Any
    weights: Weights
    acceptance: AcceptanceWindow


class DraftLearner:
    """Training beside a drafter, in steps that its worker calls for in idle time.

    `rebuild` returns the draft's network with other weights, over the same KV cache: the object
    that `draft.swap` takes.
    """

    def __init__(
        self,
        draft: SwappableDraft,
        trainer: DraftTrainer,
        rebuild: Callable[[Weights], Any],
        *,
        options: LearningOptions | None = None,
        texts: ServedTexts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._draft, self._trainer, self._rebuild = draft, trainer, rebuild
        self._options = options or LearningOptions()
        self.texts = texts or ServedTexts()
        self.idle = IdleTime(clock=clock)
        self._clock = clock
        self._served = trainer.weights()
        self._pending = PendingProposals()
        self._acceptance = AcceptanceWindow(self._options.measured_tokens)
        self._comparison: _Comparison | None = None
        self._compared_at = 0  # steps
        self._patience = 1  # factor of the steps between two comparisons
        self._num_trained = 0  # windows, with repetitions
        self._candidate: Weights | None = None  # while a network is built of it
        self._build: Future[Any] | None = None
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft-swap")
        self._earlier: _Earlier | None = None  # while a swap is measured
        # Committed length and salt of each sequence, and those whose keys earlier weights computed.
        self._sequences: dict[int, tuple[int, bytes]] = {}
        self._stale: list[int] = []
        self._num_swaps = self._num_rollbacks = 0
        self._before: float | None = None

    @property
    def progress(self) -> LearningProgress:
        return LearningProgress(
            self._trainer.num_steps,
            self._num_swaps,
            self._num_rollbacks,
            self._before,
            self._acceptance.rate,
        )

    def on_steps(self, steps: Sequence[DraftStep]) -> None:
        """Take the committed tokens of the steps, and what they say of the last proposals."""
        for step in steps:
            whole, outcome = self._pending.take(step)
            if outcome is not None:
                self._acceptance.add(*outcome)
            self.texts.add(whole)
            self._sequences[step.seq_id] = step.stop, step.policy.cache_salt

    def on_proposals(self, proposals: Sequence[Proposal]) -> None:
        self._pending.add(proposals)

    def release(self, seq_ids: Sequence[int]) -> None:
        self._pending.release(seq_ids)
        self.texts.release(seq_ids)
        for seq_id in seq_ids:
            self._sequences.pop(seq_id, None)
        self._stale = [seq_id for seq_id in self._stale if seq_id not in seq_ids]

    def refresh_one(self) -> None:
        """Compute the keys and values of one sequence that earlier weights have computed."""
        while self._stale:
            seq_id = self._stale.pop()
            committed, salt = self._sequences[seq_id]
            if self._draft.recompute(seq_id, committed=committed, salt=salt):
                return

    def step(self, has_message: Callable[[], bool]) -> float | None:
        """Do one small piece of work if its time has come.

        Returns the seconds after which to call again, or None when there is nothing to do before
        the next message.
        """
        if self._build is not None:
            if not self._build.done():
                return BUILD_POLL_S
            self._swap(self._build.result())
            return 0.0
        if self._earlier is not None and self._acceptance.is_full:
            self._decide(self._earlier)
            return 0.0
        work = self._next_work()
        if work is None:
            return None
        wait = self.idle.wait_s(self._trainer.step_seconds)
        if wait > 0:
            return wait
        start = self._clock()
        work()
        self.idle.on_step(self._clock() - start, is_awaited=has_message())
        return 0.0

    def _next_work(self) -> Callable[[], None] | None:
        if self._stale:
            return self.refresh_one
        if self._comparison is not None:
            return self._compare_some
        if self._is_comparison_due():
            return self._begin_comparison
        windows, options = self.texts.windows, self._options
        if (
            len(windows) < options.min_windows
            or self._num_trained >= options.epochs * self.texts.num_windows
        ):
            return None
        return self._train

    def _train(self) -> None:
        windows = self.texts.sample(self._trainer.batch_size)
        self._trainer.step(windows)
        self._num_trained += len(windows)

    def _is_comparison_due(self) -> bool:
        """Return whether weights are compared now: not while the latest swap is measured."""
        since = self._trainer.num_steps - self._compared_at
        return (
            self._earlier is None
            and since >= self._options.steps_between * self._patience
            and len(self.texts.held_out) >= self._options.min_held_out
        )

    def _begin_comparison(self) -> None:
        self._compared_at = self._trainer.num_steps
        self._comparison = _Comparison(list(self.texts.held_out), [], [])
        self._compare_some()

    def _compare_some(self) -> None:
        """Compare the weights on a batch of held-out windows, and build a network at the end."""
        comparison = self._comparison
        assert comparison is not None
        size = self._trainer.batch_size
        windows = comparison.windows[:size]
        del comparison.windows[:size]
        comparison.served += self._trainer.scores(windows, self._served)
        comparison.trained += self._trainer.scores(windows, None)
        if comparison.windows:
            return
        self._comparison = None
        gains = np.array(comparison.trained) - np.array(comparison.served)
        gain, error = float(gains.mean()), float(gains.std()) / len(gains) ** 0.5
        if gain >= self._options.min_gain and gain > self._options.num_errors * error:
            log.info(
                "The draft has learned from served texts: a token of held-out ones takes %.3f nats "
                "with the weights after %d steps, and took %.3f; they are swapped in",
                *(-statistics.fmean(comparison.trained), self._trainer.num_steps),
                -statistics.fmean(comparison.served),
            )
            self._start_build()
        elif not gain > -max(self._options.min_gain, self._options.num_errors * error):
            self._trainer.reset(self._served)  # clearly worse, or not a number

    def _start_build(self) -> None:
        """Build a network of the weights as they are, beside the rounds.

        A GPU's passes are captured meanwhile, which bears no other work on the device: there it is
        built at once.
        """
        self._candidate = self._trainer.weights()
        if self._draft.device.type == "cuda":
            self._build = Future()
            self._build.set_result(self._rebuild(self._candidate))
        else:
            self._build = self._builder.submit(self._rebuild, self._candidate)

    def _swap(self, network: Any) -> None:
        assert self._candidate is not None
        self._earlier = _Earlier(self._use(network), self._served, self._acceptance)
        self._before = self._acceptance.rate
        self._served, self._candidate, self._build = self._candidate, None, None
        self._acceptance = AcceptanceWindow(self._options.measured_tokens)
        self._num_swaps += 1

    def _decide(self, earlier: _Earlier) -> None:
        """Keep the latest weights, or return to the earlier ones if acceptance has fallen."""
        self._earlier = None
        fell = self._acceptance.fell_from(earlier.acceptance, num_errors=self._options.num_errors)
        log.info(
            "Acceptance in service is %.3f with the draft's new weights, and was %s; they are %s",
            self._acceptance.rate or 0.0,
            "not measured" if self._before is None else f"{self._before:.3f}",
            "rolled back" if fell else "kept",
        )
        if not fell:
            self._patience = 1
            return
        self._use(earlier.network)
        self._served = earlier.weights
        self._trainer.reset(self._served)
        self._acceptance = AcceptanceWindow(self._options.measured_tokens)
        self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._num_rollbacks += 1

    def _use(self, network: Any) -> Any:
        """Draft with another network from now on, and return the one until now."""
        earlier = self._draft.swap(network)
        self._stale = list(self._sequences)
        self._pending.discount()
        return earlier
