"""Time drafters without a model at a long context, and count the drafts that real text confirms.

`python -m lab.bench.drafters.proposal_time`

The text is Python's own standard library: one file in ten is held out, and tables are counted from
the others. No target takes part: a draft token is "confirmed" if it agrees with the text as it
stands, which is what greedy verification accepts of a target that has learned the text by heart.
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

from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO
from specserve.drafters.ngram.build import KINDS, open_ngram_drafter
from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.drafters.ngram.tables import count_texts, save_tables
from specserve.types import DraftStep, Policy, Proposal, Warp

GAMMA, SUPPORT = 8, 64
TABLE_TOKENS = 1_000_000
"""Tokens that tables are counted from."""
SCORED_TOKENS = 600
"""Tokens of a file that drafts are compared with, after twice as many that are prefilled."""
MODES = {"greedy": (0.0, "block"), "block": (1.0, "block"), "coupled": (1.0, "coupled")}
"""Temperature and verifier, by the name in the table."""
KINDS_WITH_TABLES = ("unigram", "bigram", "max_gram")


@dataclass(frozen=True, slots=True)
class ProposalCorpus:
    """Token ids of held-out files, and a directory with tables of the others."""

    held_out: list[tuple[int, ...]]
    tables: Path
    vocab_size: int

    @classmethod
    def from_standard_library(cls, directory: Path) -> ProposalCorpus:
        """Return a corpus that keeps its tables in `directory`."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        tokenizer = Tokenizer.load(DEMO / "target")
        texts = [
            tokenizer.encode(file.read_text(encoding="utf-8", errors="replace"), special=False)
            for file in files
        ]
        counted = [texts[i] for i in range(len(texts)) if i % 10]
        save_tables(
            count_texts(_first(counted, TABLE_TOKENS), keep=SUPPORT),
            directory / "tables.safetensors",
        )
        return cls(texts[::10], directory, 1 + max(max(text, default=0) for text in texts))

    def open_drafter(self, kind: str) -> NgramDrafter:
        return open_ngram_drafter(
            kind,
            path=self.tables if kind in KINDS_WITH_TABLES else None,
            learn=None,
            support=SUPPORT,
            vocab_size=self.vocab_size,
        )

    def long_text(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(islice(chain.from_iterable(self.held_out * 10), num_tokens))


def _first(texts: Sequence[Sequence[int]], num_tokens: int) -> Iterator[Sequence[int]]:
    left = num_tokens
    for text in texts:
        if left > 0:
            yield text[:left]
        left -= len(text)


def draft_step(
    seq_id: int, start: int, tokens: Sequence[int], *, mode: str, gamma: int = GAMMA
) -> DraftStep:
    temperature, verifier = MODES[mode]
    return DraftStep(
        seq_id,
        start,
        tuple(tokens),
        gamma,
        Policy(Warp(temperature=temperature), verifier, seq_id + 1, prompt_length=1),
    )


def time_prefill(drafter: NgramDrafter, text: Sequence[int]) -> float:
    """Return microseconds per prompt token."""
    started = time.perf_counter()
    drafter.draft([draft_step(0, 0, text, mode="greedy", gamma=0)], bool)
    return 1e6 * (time.perf_counter() - started) / len(text)


def time_proposals(
    drafter: NgramDrafter, text: Sequence[int], *, mode: str, num_sequences: int, rounds: int
) -> float:
    """Return the median round's microseconds per sequence.

    Each round gives every sequence one more token of the text.
    """
    half = len(text) - rounds
    drafter.draft(
        [draft_step(i, 0, text[:half], mode=mode, gamma=0) for i in range(num_sequences)], bool
    )
    seconds = []
    for length in range(half, len(text)):
        steps = [
            draft_step(i, length, text[length : length + 1], mode=mode)
            for i in range(num_sequences)
        ]
        started = time.perf_counter()
        drafter.draft(steps, bool)
        seconds.append(time.perf_counter() - started)
    drafter.release(range(num_sequences))
    return 1e6 * median(seconds) / num_sequences


def time_branches(drafter: NgramDrafter, text: Sequence[int], *, rounds: int) -> float:
    """Return the median microseconds to fork a branch, draft from it and release it."""
    (proposal,) = drafter.draft([draft_step(0, 0, text, mode="greedy")], bool)
    ids, seconds = count(1), []
    for _ in range(rounds):
        branch, stop = next(ids), proposal.start + len(proposal.tokens) // 2
        started = time.perf_counter()
        drafter.fork(0, branch, stop)
        drafter.draft([draft_step(branch, stop, (text[-branch],), mode="greedy")], bool)
        drafter.release([branch])
        seconds.append(time.perf_counter() - started)
    return 1e6 * median(seconds)


def count_confirmed(drafter: NgramDrafter, text: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the number of draft tokens of each round, and how many of them the text confirms."""
    start, stop = 0, 2 * SCORED_TOKENS
    while stop + GAMMA < min(len(text), 3 * SCORED_TOKENS):
        (proposal,) = drafter.draft([draft_step(0, start, text[start:stop], mode="greedy")], bool)
        confirmed = _num_confirmed(proposal, text)
        yield len(proposal.tokens), confirmed
        start, stop = stop + confirmed, stop + confirmed + 1
    drafter.release([0])


def _num_confirmed(proposal: Proposal, text: Sequence[int]) -> int:
    return next(
        (i for i, token in enumerate(proposal.tokens) if token != text[proposal.start + i]),
        len(proposal.tokens),
    )


def time_table(corpus: ProposalCorpus, *, context: int, rounds: int) -> str:
    heads = [f"{mode}, {num} sequence{'s' * (num > 1)}" for mode in MODES for num in (1, 16)]
    rows = [
        f"| kind | reading, a token | {' | '.join(heads)} | a branch |",
        "|---" * (len(heads) + 3) + "|",
    ]
    text = corpus.long_text(context)
    for kind in KINDS:
        figures = [time_prefill(corpus.open_drafter(kind), text)]
        for mode in MODES:
            figures += [
                time_proposals(
                    corpus.open_drafter(kind), text, mode=mode, num_sequences=num, rounds=rounds
                )
                for num in (1, 16)
            ]
        figures.append(time_branches(corpus.open_drafter(kind), text, rounds=rounds))
        rows.append(f"| {kind} | {' | '.join(f'{figure:.1f}' for figure in figures)} |")
    return "\n".join(rows)


def confirmation_table(corpus: ProposalCorpus) -> str:
    rows = [
        "| kind | rounds | with drafts | confirmed, a round | first draft token confirmed |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        drafter = corpus.open_drafter(kind)
        rounds = [pair for text in corpus.held_out for pair in count_confirmed(drafter, text)]
        confirmed = [num_confirmed for num_drafted, num_confirmed in rounds if num_drafted]
        per_round = sum(confirmed) / len(rounds)
        first = sum(num > 0 for num in confirmed) / len(confirmed)
        rows.append(
            f"| {kind} | {len(rounds):,} | {len(confirmed) / len(rounds):.0%} |"
            f" {per_round:.2f} | {first:.0%} |"
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
        corpus = ProposalCorpus.from_standard_library(Path(directory))
        tables = (
            f"Microseconds at {args.context:,} tokens of context, gamma {GAMMA}, support "
            f"{SUPPORT}; a proposal gets one more token first.\n"
        )
        tables += (
            f"\n{time_table(corpus, context=args.context, rounds=args.rounds)}\n\n"
            f"{confirmation_table(corpus)}\n"
        )
    print(tables)
    if args.out:
        args.out.write_text(
            "# Drafting without a model\n\n`python -m lab.bench.drafters.proposal_time`\n\n"
            f"{tables}"
        )


if __name__ == "__main__":
    main()
