"""Time plain decoding against `prompt_copy` on held-out rewriting tasks. Knows no training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.bench.drafters.rewriting import RewritingCorpus, RewritingTask
from lab.bench.engine import ThroughputSample, run_in_turns
from specserve.llm.llm import LLM
from specserve.sampling_params import Sampling

GAMMA, PAGES = 15, 256
DRAFTERS = {"plain": ("none", 0), "prompt_copy": ("prompt_copy", GAMMA)}
"""Kind of drafter and gamma, by the name in the table."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Answers of one engine, and its throughput."""

    sample: ThroughputSample
    rounds_per_text: float
    """Passes of the target for one text, without those for the prompt."""
    answers: tuple[tuple[int, ...], ...]


class CopyEngine:
    """Engine that generates one text after the other, the same texts in every turn."""

    def __init__(
        self, target: Path, name: str, tasks: Sequence[RewritingTask], *, threads: int
    ) -> None:
        kind, gamma = DRAFTERS[name]
        keys = {
            "draft.kind": kind,
            "speculation.gamma": gamma,
            "cache.prefix_caching": False,
            "cache.pages": PAGES,
        }
        self._llm = LLM(
            str(target), None, **keys, **{"target.threads": threads, "draft.threads": threads}
        )
        self._tasks = tasks
        self.answers: tuple[tuple[int, ...], ...] = ()
        self.rounds_per_text = 0.0

    def run(self, _turn: int) -> int:
        """Answer all tasks, prefill included, and return the number of generated tokens."""
        outputs = [
            self._llm.generate(
                [task.prompt], Sampling(temperature=0.0, max_tokens=len(task.answer))
            )[0]
            for task in self._tasks
        ]
        self.answers = tuple(output.token_ids for output in outputs)
        self.rounds_per_text = sum(
            output.stats.rounds for output in outputs if output.stats is not None
        ) / len(outputs)
        return sum(map(len, self.answers))


def compare_copying(
    target: Path, tasks: Sequence[RewritingTask], *, turns: int, threads: int
) -> dict[str, CopyResult]:
    """Run an engine for each of DRAFTERS in turns. Their answers must be equal."""
    engines = {name: CopyEngine(target, name, tasks, threads=threads) for name in DRAFTERS}
    samples = run_in_turns({name: engine.run for name, engine in engines.items()}, turns=turns)
    results = {
        name: CopyResult(samples[name], engine.rounds_per_text, engine.answers)
        for name, engine in engines.items()
    }
    assert len({one.answers for one in results.values()}) == 1, "drafts have changed a text"
    return results


def held_out_tasks(
    corpus: RewritingCorpus, *, count: int, length: int, seed: int = 1
) -> list[RewritingTask]:
    """Sample tasks from files that are not trained on."""
    rng = random.Random(seed)
    return [corpus.sample_task(length, rng, held_out=True) for _ in range(count)]


def share_correct(answers: Sequence[Sequence[int]], tasks: Sequence[RewritingTask]) -> float:
    return sum(
        tuple(answer) == task.answer for answer, task in zip(answers, tasks, strict=True)
    ) / len(tasks)
