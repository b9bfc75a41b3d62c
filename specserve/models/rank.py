"""One rank of a target: opened from a config, all of it or a share. Rank 0 judges; the others compute their part of each pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specserve.config.tree import Config
from specserve.grammar.matcher import Grammars
from specserve.models.checkpoints.load import load_tokenizer
from specserve.models.model import Placement, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.models.target import TargetModel
from specserve.types import ModelInfo, Step, Verdict, VerifyStep


class Follower:
    """A rank other than 0. Its cache takes the same steps; its logits are nobody's."""

    def __init__(self, runner: Runner, info: ModelInfo) -> None:
        self.runner, self.info = runner, info

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        writes = [
            Step(step.seq_id, step.start, step.tokens + step.drafts, step.source) for step in steps
        ]
        if writes:
            self.runner.run(writes, [len(step.drafts) + 1 if step.decide else 0 for step in steps])
        return ()

    def release(self, seq_ids: Sequence[int]) -> None:
        self.runner.release(seq_ids)


def open_rank(
    checkpoint: Path, config: Config, *, shard: Shard | None = None
) -> TargetModel | Follower:
    """Raises whatever is wrong with the checkpoint, or TooLittleMemory."""
    tells_hidden = config.draft.kind == "heads"
    opened = open_model(
        checkpoint, Placement.of(config.target, config), shard=shard, tells_hidden=tells_hidden
    )
    cache, spec = opened.runner.cache, opened.spec
    info = ModelInfo(
        vocab_size=spec.vocab_size,
        max_context=opened.max_context,
        end_ids=spec.end_ids,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        decoder_start=spec.decoder_start,
    )
    if shard is not None and shard.rank != 0:
        return Follower(opened.runner, info)
    grammars = Grammars.of(
        lambda: load_tokenizer(checkpoint), vocab_size=spec.vocab_size, end_ids=spec.end_ids
    )
    return TargetModel(
        opened.runner, info, network=opened.network, tells_hidden=tells_hidden, grammars=grammars
    )
