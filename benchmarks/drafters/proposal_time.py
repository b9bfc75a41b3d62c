"""The drafters without a model: what a proposal takes at a long context, and how much of it real text bears out.

`python -m benchmarks.drafters.proposal_time`

The text is Python's own standard library: one file in ten is judged, tables are counted from the others. No target takes part: "borne out"
is how many drafts agree with the text as it stands, which is what greedy verification would accept of a target that had learnt it by heart.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from statistics import median

import torch

from specserve.api.tokenizer import Text
from specserve.config.tree import DEMO
from specserve.drafters.ngram.build import KINDS, open_statistical
from specserve.drafters.ngram.drafter import StatisticalDrafter
from specserve.drafters.ngram.tables import count as counted
from specserve.drafters.ngram.tables import save
from specserve.types import DraftStep, Policy, Proposal, Warp

GAMMA, SUPPORT = 8, 64
LESSON, JUDGED = (
    1_000_000,
    600,
)  # tokens that tables are counted from; tokens of a file that are judged, behind twice as many that are read
WAYS = {"greedy": (0.0, "block"), "block": (1.0, "block"), "coupled": (1.0, "coupled")}
TABLED = ("unigram", "bigram", "max_gram")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids: those that were judged, file by file, and a directory with tables of the others."""

    judged: list[tuple[int, ...]]
    tables: Path
    vocab_size: int

    @classmethod
    def of_library(cls, directory: Path) -> Corpus:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = Text.load(DEMO / "target")
        texts = [
            text.encode(file.read_text(encoding="utf-8", errors="replace"), special=False)
            for file in files
        ]
        lesson = [texts[i] for i in range(len(texts)) if i % 10]
        save(counted(_first(lesson, LESSON), keep=SUPPORT), directory / "tables.safetensors")
        return cls(texts[::10], directory, 1 + max(max(own, default=0) for own in texts))

    def drafter(self, kind: str) -> StatisticalDrafter:
        return open_statistical(
            kind,
            path=self.tables if kind in TABLED else None,
            learn=None,
            support=SUPPORT,
            vocab_size=self.vocab_size,
        )

    def long(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(islice(chain.from_iterable(self.judged * 10), num_tokens))


def _first(texts: Sequence[Sequence[int]], num_tokens: int) -> Iterator[Sequence[int]]:
    left = num_tokens
    for text in texts:
        if left > 0:
            yield text[:left]
        left -= len(text)


def step(
    seq_id: int, start: int, tokens: Sequence[int], *, way: str, gamma: int = GAMMA
) -> DraftStep:
    temperature, verifier = WAYS[way]
    return DraftStep(
        seq_id,
        start,
        tuple(tokens),
        gamma,
        Policy(Warp(temperature=temperature), verifier, seq_id + 1, prompt_length=1),
    )


def reading(drafter: StatisticalDrafter, text: Sequence[int]) -> float:
    """Microseconds a token of a prompt."""
    begun = time.perf_counter()
    drafter.draft([step(0, 0, text, way="greedy", gamma=0)], bool)
    return 1e6 * (time.perf_counter() - begun) / len(text)


def proposing(
    drafter: StatisticalDrafter, text: Sequence[int], *, way: str, num_sequences: int, rounds: int
) -> float:
    """Microseconds a sequence, the median of so many rounds, in which each is told one more token of the text."""
    half = len(text) - rounds
    drafter.draft([step(i, 0, text[:half], way=way, gamma=0) for i in range(num_sequences)], bool)
    seconds = []
    for length in range(half, len(text)):
        steps = [step(i, length, text[length : length + 1], way=way) for i in range(num_sequences)]
        begun = time.perf_counter()
        drafter.draft(steps, bool)
        seconds.append(time.perf_counter() - begun)
    drafter.release(range(num_sequences))
    return 1e6 * median(seconds) / num_sequences


def branching(drafter: StatisticalDrafter, text: Sequence[int], *, rounds: int) -> float:
    """Microseconds a branch: to fork, to draft from the fork, and to forget it."""
    (proposal,) = drafter.draft([step(0, 0, text, way="greedy")], bool)
    ids, seconds = count(1), []
    for _ in range(rounds):
        branch, stop = next(ids), proposal.start + len(proposal.tokens) // 2
        begun = time.perf_counter()
        drafter.fork(0, branch, stop)
        drafter.draft([step(branch, stop, (text[-branch],), way="greedy")], bool)
        drafter.release([branch])
        seconds.append(time.perf_counter() - begun)
    return 1e6 * median(seconds)


def borne_out(drafter: StatisticalDrafter, text: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of each round through the text: how many tokens were drafted, and how many of them agree with it."""
    held, stop = 0, 2 * JUDGED
    while stop + GAMMA < min(len(text), 3 * JUDGED):
        (proposal,) = drafter.draft([step(0, held, text[held:stop], way="greedy")], bool)
        agreed = _agreed(proposal, text)
        yield len(proposal.tokens), agreed
        held, stop = stop + agreed, stop + agreed + 1
    drafter.release([0])


def _agreed(proposal: Proposal, text: Sequence[int]) -> int:
    return next(
        (i for i, token in enumerate(proposal.tokens) if token != text[proposal.start + i]),
        len(proposal.tokens),
    )


def speed(corpus: Corpus, *, context: int, rounds: int) -> str:
    heads = [f"{way}, {num} sequence{'s' * (num > 1)}" for way in WAYS for num in (1, 16)]
    rows = [
        f"| kind | reading, a token | {' | '.join(heads)} | a branch |",
        "|---" * (len(heads) + 3) + "|",
    ]
    text = corpus.long(context)
    for kind in KINDS:
        figures = [reading(corpus.drafter(kind), text)]
        for way in WAYS:
            figures += [
                proposing(corpus.drafter(kind), text, way=way, num_sequences=num, rounds=rounds)
                for num in (1, 16)
            ]
        figures.append(branching(corpus.drafter(kind), text, rounds=rounds))
        rows.append(f"| {kind} | {' | '.join(f'{figure:.1f}' for figure in figures)} |")
    return "\n".join(rows)


def use(corpus: Corpus) -> str:
    rows = [
        "| kind | rounds | with drafts | borne out, a round | first draft borne out |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        drafter = corpus.drafter(kind)
        rounds = [pair for text in corpus.judged for pair in borne_out(drafter, text)]
        drafted = [agreed for num, agreed in rounds if num]
        agreed, firsts = sum(drafted) / len(rounds), sum(one > 0 for one in drafted) / len(drafted)
        rows.append(
            f"| {kind} | {len(rounds):,} | {len(drafted) / len(rounds):.0%} | {agreed:.2f} | {firsts:.0%} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, help="write the report here, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        corpus = Corpus.of_library(Path(directory))
        tables = f"Microseconds at {args.context:,} tokens of context, gamma {GAMMA}, support {SUPPORT}; a proposal is told one more token first.\n"
        tables += f"\n{speed(corpus, context=args.context, rounds=args.rounds)}\n\n{use(corpus)}\n"
    print(tables)
    if args.out:
        args.out.write_text(
            f"# Drafting without a model\n\n`python -m benchmarks.drafters.proposal_time`\n\n{tables}"
        )


if __name__ == "__main__":
    main()
