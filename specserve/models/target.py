"""The target: it computes steps, verifies their draft tokens, and reports logprobs.

Logits never leave it. Also the other ranks of a target that several share: each computes its part
of every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specserve.config.features import part
from specserve.config.tree import Config
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.sequences import GrammarStates, PassMasks
from specserve.models.adapters import Adapters
from specserve.models.checkpoints.generation_config import sampling_defaults
from specserve.models.checkpoints.library import load_tokenizer, read_config
from specserve.models.gpu.run_ahead import RunAhead
from specserve.models.hidden_taps import HiddenRows, HiddenTaps
from specserve.models.model import Model, ModelOptions, open_model, require_context
from specserve.models.network import ShareableNetwork
from specserve.models.prompt_scores import PromptScores, reader_of
from specserve.models.runner import LogitsReader, Runner
from specserve.models.shard import Shard
from specserve.models.vocabulary_shares import PassLogits, VocabularyShares, chosen_on_shares
from specserve.sampling.distribution import (
    NOT_FINITE,
    NOT_FINITE_ERROR,
    WarpBatch,
    logprobs,
    where_finite,
)
from specserve.sampling.drafts import DraftBatch
from specserve.sampling.penalties import History
from specserve.sampling.row_draws import draw_kernel_of
from specserve.sampling.truncation import renormaliser_of
from specserve.sampling.verify import (
    RandomStreams,
    VerifyResult,
    draw_next,
    verify,
    verify_greedy,
)
from specserve.transfers import to_device, to_host
from specserve.types import Logprobs, ModelInfo, Step, Verdict, VerifyStep

TAPPED_LAYERS: Mapping[str, str] = {
    "eagle": "eagle.opening:tapped_layers",
    "dflash": "eagle.opening:layers_for_dflash",
}
"""Parts that say which layers' inputs a drafter reads, by its kind."""


@dataclass(frozen=True, slots=True)
class LatestHidden:
    """The hidden state from which the head of the model made a sequence's newest token."""

    stop: int  # length of the sequence with that token
    row: Tensor  # [hidden]


class TargetModel:
    """Rank 0 of a target, or the only one.

    If the network `returns_hidden`, the target keeps the hidden state that heads draft from, for
    each sequence. With taps, it hands the states of all committed positions of a pass to
    `on_hidden`.
    """

    def __init__(
        self,
        runner: Runner,
        info: ModelInfo,
        *,
        network: ShareableNetwork | None = None,
        returns_hidden: bool = False,
        taps: HiddenTaps | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.runner, self.info, self.network = runner, info, network
        self.adapters = adapters
        self._run_ahead: RunAhead | None = None
        if info.runs_ahead:
            self._run_ahead = RunAhead(runner, max_context=info.max_context)
        self._returns_hidden = returns_hidden
        self.grammar_states = GrammarStates(grammar_compiler)
        self.latest_hidden: dict[int, LatestHidden] = {}
        self._taps = taps
        self._shares = VocabularyShares.of_runner(runner)
        self._written: Sequence[Step] = ()  # of the pass under way, without what was cached
        self.on_hidden: Callable[[Sequence[HiddenRows]], None] | None = None
        if taps is not None:
            runner.on_written = self._remember_written

    @property
    def num_layers(self) -> int:
        return len(self.runner.cache.keys)

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        if self.adapters is not None:
            return self.adapters.verify(steps, self._verify)
        if self._run_ahead is not None:
            return self._run_ahead.verify(steps, self._verify)
        return self._verify(steps)

    def _verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        if not steps:
            return []
        decided = [step for step in steps if step.needs_verdict]
        chosen = frozenset[int]() if self._shares is None else chosen_on_shares(steps)
        whole = [step for step in decided if step.seq_id not in chosen]
        self.grammar_states.register(steps)
        # Masks are computed while the pass runs.
        masks = self.grammar_states.submit_masks(
            whole, self.runner.cache.tokens, has_others=len(whole) < len(steps)
        )
        scores = None
        if any(step.scoring is not None for step in steps):
            scores = PromptScores(steps, self.info.vocab_size)
        try:
            logits = _run_pass(
                self.runner, self._shares, steps, None if scores is None else scores.reader
            )
        finally:
            masked = None if masks is None else masks.result()
        verdicts: list[Verdict] = []
        if decided:
            verdicts = self._with_hits(self._verdicts(decided, logits, masked))
            if self._returns_hidden:
                self._keep_hidden(decided, verdicts, logits.rows[:, self.info.vocab_size :])
        if self.on_hidden is not None:
            self.on_hidden(self._committed_hidden(steps, verdicts))
        return verdicts if scores is None else scores.add_to(verdicts)

    def release(self, seq_ids: Sequence[int]) -> None:
        self.runner.release(seq_ids)
        self.grammar_states.release(seq_ids)
        if self.adapters is not None:
            self.adapters.release(seq_ids)
        for seq_id in seq_ids:
            self.latest_hidden.pop(seq_id, None)

    def _remember_written(self, steps: Sequence[Step]) -> None:
        self._written = steps

    def _committed_hidden(
        self, steps: Sequence[VerifyStep], verdicts: Sequence[Verdict]
    ) -> list[HiddenRows]:
        """Return the tapped states of all positions that the pass computed and did not reject."""
        assert self._taps is not None, "a target without taps has no hidden states to hand over"
        rows, found, first = self._taps.take(), [], 0
        accepted = iter(verdicts)
        for step, written in zip(steps, self._written, strict=True):
            stop = step.stop + (next(accepted).accepted if step.needs_verdict else 0)
            own = rows[first : first + stop - written.start]
            found.append(HiddenRows(step.seq_id, written.start, own))
            first += len(written.tokens)
        return found

    @torch.inference_mode()
    def _keep_hidden(
        self, steps: Sequence[VerifyStep], verdicts: Sequence[Verdict], hidden: Tensor
    ) -> None:
        """Keep one row of each sequence, copied, so that the rest of the pass can be freed."""
        ends = [0, *accumulate(len(step.drafts) + 1 for step in steps)]
        rows = hidden[
            [first + verdict.accepted for first, verdict in zip(ends, verdicts, strict=False)]
        ]
        for step, verdict, row in zip(steps, verdicts, rows.unbind(), strict=True):
            self.latest_hidden[step.seq_id] = LatestHidden(step.stop + verdict.accepted + 1, row)

    @torch.inference_mode()
    def _verdicts(
        self, steps: Sequence[VerifyStep], found: PassLogits, masks: PassMasks | None
    ) -> list[Verdict]:
        """Decide on the draft tokens of these steps.

        A step has a row for each draft token and one more. Logprobs are the model's own, without
        the grammar.
        """
        whole = [step for step in steps if step.seq_id not in found.chosen]
        unmasked = found.rows[:, : self.info.vocab_size]
        logits = unmasked if masks is None else masks.token_mask.apply(unmasked)
        alone = [step for step in steps if step.seq_id in found.chosen]
        outcomes = self._outcomes(alone, found.own, whole, logits)
        rows = _logprobs(whole, unmasked, [outcomes[step.seq_id] for step in whole])
        errors, undecided = ({}, ()) if masks is None else (masks.errors, masks.undecided)
        verdicts = []
        for step in steps:
            accepted, token = outcomes[step.seq_id]
            if step.seq_id in undecided:
                verdict = Verdict(step.seq_id, 0, 0, None, is_decision=False)
            elif (error := errors.get(step.seq_id)) is not None:
                verdict = Verdict.failed(step.seq_id, error)
            elif token == NOT_FINITE:
                verdict = Verdict.failed(step.seq_id, NOT_FINITE_ERROR)
            else:
                verdict = Verdict(step.seq_id, accepted, token, rows.get(step.seq_id))
            verdicts.append(verdict)
        return verdicts

    def _with_hits(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Add what the prefix cache had of a sequence to the first decision on it."""
        hits = self.runner.cache.unreported_hits
        if not hits:
            return verdicts
        return [
            replace(verdict, cached_tokens=hits.pop(verdict.seq_id))
            if verdict.is_decision and verdict.seq_id in hits
            else verdict
            for verdict in verdicts
        ]

    def _outcomes(
        self,
        alone: Sequence[VerifyStep],
        own: Tensor | None,
        whole: Sequence[VerifyStep],
        logits: Tensor,
    ) -> dict[int, tuple[int, int]]:
        """Return how many draft tokens of each sequence are accepted, and the next token.

        The target's `own` tokens decide on some steps alone, and `logits` [rows, vocab] on the
        whole ones. A device is waited for once. On a CPU the next token is NOT_FINITE if a row that
        decided was; on a GPU to ask would take launches and a copy in every pass.
        """
        compared = list(alone)
        tokens, results = [] if own is None else [own], list[Tensor]()
        if whole:
            warps = WarpBatch(
                [step.policy.warp for step in whole],
                [len(step.drafts) + 1 for step in whole],
                [self._history(step) if step.policy.warp.needs_history else None for step in whole],
            )
            if warps.all_greedy:
                compared += whole
                likeliest = warps.greedy_tokens(logits)
                if logits.is_cpu:
                    highest = logits.gather(1, likeliest[:, None])[:, 0]
                    likeliest = where_finite(likeliest, highest)
                tokens.append(likeliest)
            else:
                result = _verify_drafts(whole, warps, logits)
                results = [result.accepted, result.next_token]
        arrays = to_host(*tokens, *results)
        flat = [token for array in arrays[: len(tokens)] for token in array.tolist()]
        greedy = verify_greedy(flat, [step.drafts for step in compared])
        outcomes = {step.seq_id: outcome for step, outcome in zip(compared, greedy, strict=True)}
        if results:
            accepted, following = (array.tolist() for array in arrays[len(tokens) :])
            ends = [0, *accumulate(len(step.drafts) + 1 for step in whole)]
            broken = _broken_rows(logits)
            for step, first, count, token in zip(whole, ends, accepted, following, strict=False):
                is_broken = broken and any(first <= row <= first + count for row in broken)
                outcomes[step.seq_id] = (count, NOT_FINITE if is_broken else token)
        return outcomes

    def _history(self, step: VerifyStep) -> History:
        written = self.runner.cache.tokens(step.seq_id)
        return History(
            written[: len(written) - len(step.drafts)], step.policy.prompt_length, step.drafts
        )


class TargetFollower:
    """A rank other than 0. Its cache takes the same steps; its logits are not used."""

    def __init__(self, runner: Runner, info: ModelInfo, adapters: Adapters | None = None) -> None:
        self.runner, self.info, self.adapters = runner, info, adapters
        self._shares = VocabularyShares.of_runner(runner)

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        if self.adapters is None:
            self._run(steps)
        else:
            self.adapters.verify(steps, self._run)
        return ()

    def _run(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        if steps:
            # The ranks compute the logits of each slice together.
            _run_pass(self.runner, self._shares, steps, reader_of(steps, lambda logits: None))
        return ()

    def release(self, seq_ids: Sequence[int]) -> None:
        self.runner.release(seq_ids)
        if self.adapters is not None:
            self.adapters.release(seq_ids)


def open_target(
    checkpoint: Path, config: Config, *, shard: Shard | None = None
) -> TargetModel | TargetFollower:
    """Open one rank of a target: the whole of it, or a share.

    Raises TooLittleMemory, or ModelError for what is wrong with the checkpoint.
    """
    returns_hidden = config.draft.kind == "heads"
    is_first = shard is None or shard.rank == 0
    taps = hidden_taps(checkpoint, config) if is_first else None
    require_context(checkpoint, config.limits)
    recommended = sampling_defaults(checkpoint, config.target)
    opened = open_model(
        checkpoint,
        ModelOptions.from_config(config.target, config),
        shard=shard,
        returns_hidden=returns_hidden,
        taps=taps,
    )
    device, spec = opened.runner.cache.device, opened.spec
    # Tried, and compiled, before anybody waits for them.
    draw_kernel_of(device)
    if device.type == "cuda":
        renormaliser_of(device)
    takes_hidden = returns_hidden or taps is not None
    info = _describe(opened, recommended, runs_ahead=shard is None and not takes_hidden)
    if not is_first:
        return TargetFollower(opened.runner, info, opened.adapters)
    grammar_compiler = GrammarCompiler.from_tokenizer(
        lambda: load_tokenizer(checkpoint), vocab_size=spec.vocab_size, end_ids=spec.end_ids
    )
    return TargetModel(
        opened.runner,
        info,
        network=opened.network,
        returns_hidden=returns_hidden,
        taps=taps,
        grammar_compiler=grammar_compiler,
        adapters=opened.adapters,
    )


def _describe(opened: Model, recommended: Mapping[str, float], *, runs_ahead: bool) -> ModelInfo:
    """Return what others know of an open model; it can run ahead only if it is on a GPU."""
    cache, spec = opened.runner.cache, opened.spec
    return ModelInfo(
        vocab_size=spec.vocab_size,
        max_context=opened.max_context,
        end_ids=spec.end_ids,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        prefix_caching=cache.prefix_caching,
        decoder_start=spec.decoder_start,
        runs_ahead=runs_ahead
        and cache.device.type == "cuda"
        and not spec.is_encoder_decoder
        and opened.adapters is None,
        irreproducible=opened.irreproducible,
        sampling_defaults=recommended,
    )


def hidden_taps(checkpoint: Path, config: Config) -> HiddenTaps | None:
    """Return taps at the layers that the drafter of the config reads, if it reads any."""
    if config.draft.kind not in TAPPED_LAYERS:
        return None
    num_layers = read_config(checkpoint).num_hidden_layers
    return HiddenTaps(part(TAPPED_LAYERS[config.draft.kind])(checkpoint, num_layers, config.draft))


def _run_pass(
    runner: Runner,
    shares: VocabularyShares | None,
    steps: Sequence[VerifyStep],
    reader: LogitsReader | None,
) -> PassLogits:
    """Run a pass on every rank; the logits stay where they are if nothing reads whole prompts."""
    if shares is None or any(step.scoring is not None for step in steps):
        return PassLogits(runner.run(_writes(steps), _num_logits(steps), reader))
    with shares.kept():
        part = runner.run(_writes(steps), _num_logits(steps))
    return shares.exchange(part, [step for step in steps if step.needs_verdict])


def _writes(steps: Sequence[VerifyStep]) -> list[Step]:
    return [
        Step(
            step.seq_id,
            step.start,
            step.tokens + step.drafts,
            step.encoder_input,
            step.policy.cache_salt,
            step.policy.adapter,
        )
        for step in steps
    ]


def _num_logits(steps: Sequence[VerifyStep]) -> list[int]:
    """Return how many of the last rows of each step have logits that decide on draft tokens."""
    return [len(step.drafts) + 1 if step.needs_verdict else 0 for step in steps]


def _verify_drafts(steps: Sequence[VerifyStep], warps: WarpBatch, logits: Tensor) -> VerifyResult:
    names = [step.policy.verifier for step in steps]
    streams = RandomStreams.from_seeds(
        [step.policy.seed for step in steps], [step.stop for step in steps]
    )
    if not any(step.drafts for step in steps):
        following = draw_next(names, warps, logits, streams)
        return VerifyResult(torch.zeros_like(following), following)
    # A draw needs no sum over the vocabulary, and has the bits of one on shares of it.
    is_draw = np.array([step.policy.verifier == "coupled" or not step.drafts for step in steps])
    counts = [len(step.drafts) + 1 for step in steps]
    p = warps.probabilities(logits, as_weights=is_draw.repeat(counts))
    drafts = DraftBatch.from_tokens(
        [step.drafts for step in steps],
        [step.q for step in steps],
        lenience=[step.policy.lenience for step in steps],
        device=p.device,
    )
    return verify(names, p, drafts, streams)


def _broken_rows(logits: Tensor) -> list[int]:
    """Return the rows whose highest logits are not finite, on a CPU."""
    if not logits.is_cpu:
        return []
    is_finite = np.isfinite(logits.float().numpy().max(-1))
    return [] if is_finite.all() else np.flatnonzero(~is_finite).tolist()


def _logprobs(
    steps: Sequence[VerifyStep], logits: Tensor, outcomes: Sequence[tuple[int, int]]
) -> dict[int, tuple[Logprobs, ...]]:
    """Return the logprobs of each committed token, from the target's row at its position.

    They do not depend on who proposed the token.
    """
    firsts = [0, *accumulate(len(step.drafts) + 1 for step in steps)]
    groups: dict[int, list[int]] = {}  # steps that are computed together
    for i, step in enumerate(steps):
        if step.policy.logprobs is not None and outcomes[i][1] != NOT_FINITE:
            # On a CPU, where there is no device to wait for, each by itself.
            groups.setdefault(i if logits.is_cpu else step.policy.logprobs, []).append(i)
    found: dict[int, tuple[Logprobs, ...]] = {}
    for group in groups.values():
        counts = [outcomes[i][0] + 1 for i in group]
        rows = [
            row
            for i, n in zip(group, counts, strict=True)
            for row in range(firsts[i], firsts[i] + n)
        ]
        tokens = [token for i in group for token in _committed(steps[i], outcomes[i])]
        where, committed = to_device(np.array([rows, tokens]), logits.device)
        num_top = steps[group[0]].policy.logprobs
        assert num_top is not None
        computed = iter(logprobs(logits[where], committed, num_top))
        for i, count in zip(group, counts, strict=True):
            found[steps[i].seq_id] = tuple(next(computed) for _ in range(count))
    return found


def _committed(step: VerifyStep, outcome: tuple[int, int]) -> tuple[int, ...]:
    accepted, token = outcome
    return (*step.drafts[:accepted], token)
