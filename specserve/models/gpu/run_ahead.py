"""Plain decoding on a GPU, one pass ahead: the next pass is enqueued before the last is read.

A pass of decoding needs the tokens of the pass before it, and they are on the card. So the card
goes on while the host reads them, commits them and sends them out. The next steps say which
sequences go on: a step (seq, start, tokens) that continues the pass ahead takes its row from it,
and the rows of all others are dropped. The messages of a round are as for any other target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.errors import OutOfPages
from specserve.models.runner import Runner
from specserve.sampling.distribution import WarpBatch
from specserve.sampling.verify import RandomStreams, draw_next
from specserve.transfers import to_device
from specserve.types import Policy, Verdict, VerifyStep

Compute = Callable[[Sequence[VerifyStep]], Sequence[Verdict]]


@dataclass(frozen=True, slots=True)
class AheadPass:
    """An enqueued pass that writes one token of each sequence, and what is chosen after it."""

    rows: Mapping[int, int]  # by sequence
    starts: Sequence[int]  # [rows] the position that each row writes
    tokens: Tensor  # [rows] chosen after them, on the device
    on_host: Tensor  # [rows] the same in pinned memory, once the event has come
    copied: Any

    def read(self) -> list[int]:
        """Return the chosen tokens. Waits for this pass, and for none after it."""
        self.copied.synchronize()
        tokens: list[int] = self.on_host.tolist()
        return tokens


class RunAhead:
    """The pass ahead of a target's rounds, if there is one.

    It is enqueued where all sequences of a round decode and want no draft tokens, and nothing that
    the host must know decides on their next tokens.
    """

    def __init__(self, runner: Runner, *, max_context: int) -> None:
        self._runner, self._max_context = runner, max_context
        self._ahead: AheadPass | None = None
        self._written: Mapping[int, int] = {}  # the token that it writes, by sequence
        self._rule: DrawRule | None = None  # of the last pass's sequences

    @torch.inference_mode()
    def verify(self, steps: Sequence[VerifyStep], compute: Compute) -> list[Verdict]:
        """Return verdicts from the pass ahead where it has them, else by `compute`.

        Then the next pass is enqueued: before the last one is read, if that answers all steps.
        """
        ahead, self._ahead = self._ahead, None
        found = {} if ahead is None else self._take(ahead, steps)
        goes_on = bool(steps) and all(map(_goes_on_alone, steps))
        if ahead is not None and len(found) == len(steps):
            if goes_on:
                self._enqueue(steps, _select(ahead.tokens, [found[step.seq_id] for step in steps]))
            answers = _verdicts(steps, found, ahead.read()) if steps else []
        else:
            answers = list(compute([step for step in steps if step.seq_id not in found]))
            if ahead is not None and found:
                answers = _in_order(steps, answers + _verdicts(steps, found, ahead.read()))
            if goes_on:
                tokens = np.array([verdict.next_token for verdict in answers])
                self._enqueue(steps, to_device(tokens, self._runner.device))
        self._written = {verdict.seq_id: verdict.next_token for verdict in answers}
        return answers

    def _take(self, ahead: AheadPass, steps: Sequence[VerifyStep]) -> dict[int, int]:
        """Return the rows of the steps that continue the pass, and free the room of all others."""
        cache, found = self._runner.cache, dict[int, int]()
        for step in steps:
            row = ahead.rows.get(step.seq_id)
            if (
                row is not None
                and step.needs_verdict
                and not step.drafts
                and step.start == ahead.starts[row] == cache.length(step.seq_id)
                and step.tokens == (self._written[step.seq_id],)
            ):
                cache.commit(step.seq_id, step.start)
                cache.append(step.seq_id, step.tokens)
                found[step.seq_id] = row
        for seq_id in ahead.rows:
            if seq_id not in found:
                cache.truncate(seq_id, cache.length(seq_id))
        return found

    def _enqueue(self, steps: Sequence[VerifyStep], tokens: Tensor) -> None:
        """Enqueue the pass after these steps that writes `tokens` [steps], if it fits."""
        lasting = [i for i, step in enumerate(steps) if step.stop < self._max_context]
        if not lasting:
            return
        seq_ids, starts = [steps[i].seq_id for i in lasting], [steps[i].stop for i in lasting]
        try:
            passes = self._runner.decode_passes(seq_ids, [1] * len(lasting))
        except OutOfPages:
            return
        logits = passes.logits(_select(tokens, lasting))
        policies = [steps[i].policy for i in lasting]
        if self._rule is None or self._rule.policies != policies:
            self._rule = DrawRule.from_policies(policies)
        chosen = self._rule.choose(logits, [start + 1 for start in starts])
        on_host = torch.empty(chosen.shape, dtype=chosen.dtype).pin_memory()
        on_host.copy_(chosen, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self._runner.device))
        rows = {seq_id: row for row, seq_id in enumerate(seq_ids)}
        self._ahead = AheadPass(rows, starts, chosen, on_host, copied)


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How the next tokens of some sequences are chosen, from one row of logits each."""

    policies: Sequence[Policy]
    warps: WarpBatch
    verifiers: Sequence[str]
    seeds: Sequence[int]

    @classmethod
    def from_policies(cls, policies: Sequence[Policy]) -> DrawRule:
        return cls(
            policies,
            WarpBatch([policy.warp for policy in policies], [1] * len(policies)),
            [policy.verifier for policy in policies],
            [policy.seed for policy in policies],
        )

    def choose(self, logits: Tensor, lengths: Sequence[int]) -> Tensor:  # [seqs, vocab] -> [seqs]
        """Return the next token of sequences of these lengths, as a round without drafts does."""
        if self.warps.all_greedy:
            return self.warps.greedy_tokens(logits)
        streams = RandomStreams.from_seeds(self.seeds, lengths)
        return draw_next(self.verifiers, self.warps, logits, streams)


def _goes_on_alone(step: VerifyStep) -> bool:
    """Return whether the round after a step needs its token, and nothing else from the host."""
    policy = step.policy
    return (
        step.needs_verdict
        and not step.drafts
        and not step.gamma
        and step.scoring is None
        and policy.logprobs is None
        and not policy.constrained
        and not policy.warp.needs_history
        and policy.adapter is None
    )


def _verdicts(
    steps: Sequence[VerifyStep], found: Mapping[int, int], chosen: Sequence[int]
) -> list[Verdict]:
    """Return the verdicts of the steps that are found, whose tokens stand in these rows."""
    return [
        Verdict(step.seq_id, 0, chosen[found[step.seq_id]], None)
        for step in steps
        if step.seq_id in found
    ]


def _in_order(steps: Sequence[VerifyStep], verdicts: Sequence[Verdict]) -> list[Verdict]:
    of = {verdict.seq_id: verdict for verdict in verdicts}
    return [of[step.seq_id] for step in steps if step.seq_id in of]


def _select(tokens: Tensor, rows: Sequence[int]) -> Tensor:
    if rows == list(range(len(tokens))):
        return tokens
    return tokens.index_select(0, to_device(np.array(rows), tokens.device))
