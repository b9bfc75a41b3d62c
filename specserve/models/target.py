"""The target as the coordinator sees it: writes steps, warps what comes out, and judges the proposals. Logits never leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specserve.grammar.matcher import Grammars
from specserve.grammar.sequences import Masks, Parses
from specserve.models.network import Lending
from specserve.models.runner import Runner
from specserve.sampling.distribution import History, WarpBatch, logprobs
from specserve.sampling.drafts import Drafts
from specserve.sampling.verify import Streams, agree, verify
from specserve.types import Logprobs, ModelInfo, Step, Verdict, VerifyStep


@dataclass(frozen=True, slots=True)
class Newest:
    """What the head of the model made a sequence's newest token of."""

    stop: int  # length of the sequence with that token
    row: Tensor  # [hidden]


class TargetModel:
    """Rank 0 of a target, or the only one. One whose network `tells_hidden` keeps of each sequence what heads draft by."""

    def __init__(
        self,
        runner: Runner,
        info: ModelInfo,
        *,
        network: Lending | None = None,
        tells_hidden: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        self.runner, self.info, self.network, self._tells_hidden = (
            runner,
            info,
            network,
            tells_hidden,
        )
        self.parses = Parses(grammars)
        self.newest: dict[int, Newest] = {}

    @property
    def num_layers(self) -> int:
        return len(self.runner.cache.keys)

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        if not steps:
            return []
        decided = [step for step in steps if step.decide]
        self.parses.meet(steps)
        masks = self.parses.masking(decided, self.runner.cache.tokens)  # beside the pass
        writes = [
            Step(step.seq_id, step.start, step.tokens + step.drafts, step.source) for step in steps
        ]
        try:
            logits = self.runner.run(
                writes, [len(step.drafts) + 1 if step.decide else 0 for step in steps]
            )
        finally:
            found = None if masks is None else masks.result()
        if not decided:
            return []
        verdicts = self._verdicts(decided, logits[:, : self.info.vocab_size], found)
        if self._tells_hidden:
            self._keep(decided, verdicts, logits[:, self.info.vocab_size :])
        return verdicts

    def release(self, seq_ids: Sequence[int]) -> None:
        self.runner.release(seq_ids)
        self.parses.release(seq_ids)
        for seq_id in seq_ids:
            self.newest.pop(seq_id, None)

    @torch.inference_mode()
    def _keep(
        self, steps: Sequence[VerifyStep], verdicts: Sequence[Verdict], hidden: Tensor
    ) -> None:
        """One row of each sequence, copied, so that the rest of the pass can go."""
        ends = [0, *accumulate(len(step.drafts) + 1 for step in steps)]
        rows = hidden[
            [first + verdict.accepted for first, verdict in zip(ends, verdicts, strict=False)]
        ]
        for step, verdict, row in zip(steps, verdicts, rows.unbind(), strict=True):
            self.newest[step.seq_id] = Newest(
                step.start + len(step.tokens) + verdict.accepted + 1, row
            )

    @torch.inference_mode()
    def _verdicts(
        self, steps: Sequence[VerifyStep], unmasked: Tensor, masks: Masks | None
    ) -> list[Verdict]:
        """unmasked [rows, vocab]: for each step a row for each draft token and one more. Logprobs are those of the model alone."""
        policies, logits = (
            [step.policy for step in steps],
            unmasked if masks is None else masks.allowed.applied(unmasked),
        )
        warps = WarpBatch(
            [policy.warp for policy in policies],
            [len(step.drafts) + 1 for step in steps],
            [self._history(step) for step in steps],
        )
        judged = (
            agree(warps.greedy_tokens(logits).tolist(), [step.drafts for step in steps])
            if warps.all_greedy
            else _judged(steps, warps.probabilities(logits))
        )
        rows, errors = _logprobs(steps, unmasked, judged), {} if masks is None else masks.errors
        return [
            Verdict(step.seq_id, *outcome, row, errors.get(step.seq_id))
            for step, outcome, row in zip(steps, judged, rows, strict=True)
        ]

    def _history(self, step: VerifyStep) -> History | None:
        if not step.policy.warp.has_penalties:
            return None
        written = self.runner.cache.tokens(step.seq_id)
        return History(
            written[: len(written) - len(step.drafts)], step.policy.prompt_length, step.drafts
        )


def _judged(steps: Sequence[VerifyStep], p: Tensor) -> list[tuple[int, int]]:
    """How many drafts of each sequence stand, and what follows."""
    policies = [step.policy for step in steps]
    drafts = Drafts.of(
        [step.drafts for step in steps],
        [step.q for step in steps],
        lenience=[policy.lenience for policy in policies],
        device=p.device,
    )
    streams = Streams.of(
        [policy.seed for policy in policies], [step.start + len(step.tokens) for step in steps]
    )
    outcome = verify([policy.verifier for policy in policies], p, drafts, streams)
    return list(zip(outcome.accepted.tolist(), outcome.next_token.tolist(), strict=True))


def _logprobs(
    steps: Sequence[VerifyStep], logits: Tensor, judged: Sequence[tuple[int, int]]
) -> list[tuple[Logprobs, ...] | None]:
    """Of each committed token, whoever proposed it: its row is that of the target at its place."""
    found: list[tuple[Logprobs, ...] | None] = []
    row = 0
    for step, (stand, token) in zip(steps, judged, strict=True):
        committed = (*step.drafts[:stand], token)
        num_top = step.policy.logprobs
        if num_top is None:
            found.append(None)
        else:
            found.append(
                tuple(
                    logprobs(
                        logits[row : row + stand + 1],
                        torch.tensor(committed, device=logits.device),
                        num_top,
                    )
                )
            )
        row += len(step.drafts) + 1
    return found
