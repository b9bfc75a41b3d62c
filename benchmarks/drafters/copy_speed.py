"""The copying model by the clock: plain decoding and `prompt_copy` in turns, on held-out texts. Knows no training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drafters.rewriting import Rewriting, Task
from benchmarks.engine import Sample, in_turns
from specserve.llm import LLM
from specserve.sampling_params import Sampling

GAMMA, PAGES = 15, 256
WAYS = {"plain": ("none", 0), "prompt_copy": ("prompt_copy", GAMMA)}


@dataclass(frozen=True, slots=True)
class Copied:
    """What a way wrote, and how fast."""

    sample: Sample
    passes: float  # of the target for a text, the prompt's left out
    answers: tuple[tuple[int, ...], ...]


class Writer:
    """One engine that is asked for one text after the other, the same in every turn."""

    def __init__(self, target: Path, way: str, tasks: Sequence[Task], *, threads: int) -> None:
        kind, gamma = WAYS[way]
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
        self.passes = 0.0

    def write(self, _turn: int) -> int:
        """The number of tokens that were written, prompts read on the way."""
        outputs = [
            self._llm.generate(
                [task.prompt], Sampling(temperature=0.0, max_tokens=len(task.answer))
            )[0]
            for task in self._tasks
        ]
        self.answers = tuple(output.token_ids for output in outputs)
        self.passes = sum(
            output.stats.rounds for output in outputs if output.stats is not None
        ) / len(outputs)
        return sum(map(len, self.answers))


def copied(target: Path, tasks: Sequence[Task], *, turns: int, threads: int) -> dict[str, Copied]:
    """Of each way. All write the same, or something is broken."""
    writers = {way: Writer(target, way, tasks, threads=threads) for way in WAYS}
    samples = in_turns({way: writer.write for way, writer in writers.items()}, turns=turns)
    found = {
        way: Copied(samples[way], writer.passes, writer.answers) for way, writer in writers.items()
    }
    assert len({one.answers for one in found.values()}) == 1, "drafts have changed a text"
    return found


def tasks(rewriting: Rewriting, *, count: int, length: int, seed: int = 1) -> list[Task]:
    """Of files that nobody was trained on."""
    chance = random.Random(seed)
    return [rewriting.drawn(length, chance, held_out=True) for _ in range(count)]


def share_right(answers: Sequence[Sequence[int]], wanted: Sequence[Task]) -> float:
    return sum(
        tuple(answer) == task.answer for answer, task in zip(answers, wanted, strict=True)
    ) / len(wanted)
