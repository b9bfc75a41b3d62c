"""A draft that learns from what is served: `python -m lab.bench.learning --minutes 60`.

The demo pair knows Python's source code. Here it is served prose, the guides of this repository,
with a draft apart that learns (`draft.learn`). Acceptance is measured before, in windows while it
is served, and after, on pages that were never served; texts are compared with plain decoding.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from specserve import LLM, Sampling
from specserve.api.tokenizer import Tokenizer
from specserve.cluster.program_group import open_parts_on_ray
from specserve.cluster.remote import RemoteDrafter
from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import held_out_prompts
from specserve.learning_progress import LearningProgress
from specserve.local_engine import Output
from specserve.progress import no_progress
from specserve.tools.bench.report import machine

ROOT = Path(__file__).parents[2]
PAGES = ("docs/guides/*.md", "docs/design/*.md", "README.md", "CHANGELOG.md")
PROMPT_LENGTH = 64
BLOCK = 512
"""Tokens of a page that are served or held out together."""
HELD_OUT = 8
"""One block in so many is held out."""
STREAMS = 4
KEYS: Mapping[str, Any] = {
    "target.threads": 1,
    "draft.threads": 1,
    "speculation.gamma": 4,
    "cache.pages": 1024,
}
Prompt = tuple[int, ...]
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts to serve, and others that only measure."""

    served: list[list[int]]  # blocks
    prose: list[Prompt]
    code: list[Prompt]

    @classmethod
    def from_pages(cls, num_held_out: int) -> Traffic:
        tokenizer = Tokenizer.load(DEMO / "target")
        paths = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
        pages = [tokenizer.encode(path.read_text(encoding="utf-8")) for path in paths]
        blocks = [
            list(page[start : start + BLOCK])
            for page in pages
            for start in range(0, len(page) - BLOCK + 1, BLOCK)
        ]
        held_out = [tuple(block[:PROMPT_LENGTH]) for block in blocks[::HELD_OUT]]
        code = list(held_out_prompts(count=num_held_out, length=PROMPT_LENGTH))
        served = [block for i, block in enumerate(blocks) if i % HELD_OUT]
        return cls(served, held_out[:num_held_out], code)

    def batch(self, rng: random.Random) -> list[Prompt]:
        """Return prompts that begin anywhere in the served pages."""
        starts = [
            (rng.choice(self.served), rng.randrange(BLOCK - PROMPT_LENGTH)) for _ in range(STREAMS)
        ]
        return [tuple(block[start : start + PROMPT_LENGTH]) for block, start in starts]


@dataclass(slots=True)
class Acceptance:
    """Draft tokens of some texts, and how many were accepted."""

    drafted: int = 0
    accepted: int = 0

    def add(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            assert output.stats is not None
            self.drafted += output.stats.drafted
            self.accepted += output.stats.accepted

    def __str__(self) -> str:
        return f"{self.accepted / self.drafted:.3f}" if self.drafted else "-"


@dataclass(slots=True)
class MeasuredTexts:
    """Texts and acceptance of the measuring prompts, greedy and at temperature 1, by kind."""

    texts: list[Text] = field(default_factory=list)
    rates: dict[str, Acceptance] = field(default_factory=dict)

    @classmethod
    def of(cls, llm: LLM, prompts: Mapping[str, Sequence[Prompt]], tokens: int) -> MeasuredTexts:
        found = cls()
        for kind, some in prompts.items():
            for name, sampling in samplings(tokens).items():
                outputs = llm.generate(list(some), sampling)
                found.texts += [tuple(output.token_ids) for output in outputs]
                found.rates.setdefault(f"{kind}, {name}", Acceptance()).add(outputs)
        return found


@dataclass(slots=True)
class ServedWindow:
    """A stretch of served traffic."""

    minutes: float  # from the start, at its end
    progress: LearningProgress
    acceptance: Acceptance
    is_plain: bool  # the texts that were compared are those of plain decoding

    def row(self) -> str:
        one = self.progress
        return (
            f"| {self.minutes:.1f} | {self.acceptance} | {one.steps} | {one.swaps} | "
            f"{one.rollbacks} | {'the same' if self.is_plain else 'another'} |"
        )


def samplings(tokens: int) -> dict[str, Sampling]:
    return {
        "greedy": Sampling(max_tokens=tokens, temperature=0, ignore_eos=True),
        "temperature 1": Sampling(max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True),
    }


def serve(
    llm: LLM,
    drafter: RemoteDrafter,
    traffic: Traffic,
    plain: Sequence[Text],
    args: argparse.Namespace,
) -> list[ServedWindow]:
    """Serve prose for so many minutes, half of it greedy; compare some texts in each window."""
    rng, start, windows = random.Random(0), time.monotonic(), []
    check = {"prose": traffic.prose[:STREAMS]}
    for window in range(1, args.windows + 1):
        until = start + 60 * args.minutes * window / args.windows
        acceptance, i = Acceptance(), 0
        while time.monotonic() < until or not i:
            sampling = Sampling(max_tokens=args.tokens, temperature=1.0 * (i % 2), ignore_eos=True)
            acceptance.add(llm.generate(list(traffic.batch(rng)), sampling))
            time.sleep(args.pause)
            i += 1
        is_plain = MeasuredTexts.of(llm, check, args.tokens).texts == list(plain)
        windows.append(
            ServedWindow(
                (time.monotonic() - start) / 60,
                drafter.learning or LearningProgress(),
                acceptance,
                is_plain,
            )
        )
        print(windows[-1].row(), flush=True)
    return windows


def page(
    args: argparse.Namespace,
    before: MeasuredTexts,
    after: MeasuredTexts,
    plain: MeasuredTexts,
    windows: Sequence[ServedWindow],
) -> str:
    same = before.texts == plain.texts == after.texts
    measured = [f"| {name} | {before.rates[name]} | {after.rates[name]} |" for name in before.rates]
    return "\n\n".join(
        (
            "# A draft that learns",
            f"`make bench-learning` (`python -m lab.bench.learning --minutes {args.minutes:g}`)",
            f"{date.today()}, {machine()}; the demo pair, the draft apart, a thread each; gamma 4. "
            f"Served for {60 * windows[-1].minutes:.0f} seconds: {STREAMS} streams of "
            f"{args.tokens} tokens behind prose, greedy and at temperature 1 in turns, with a "
            f"pause of {args.pause:g} s between batches. The draft was trained on Python's source "
            "code. Accepted share of the drafted tokens.",
            "## Before and after, on prompts that were not served",
            "\n".join(
                ("| texts | before | after |", "|---|---|---|", *measured),
            ),
            f"Texts before, after and without a draft: {'the same' if same else 'NOT THE SAME'}, "
            f"token for token ({len(plain.texts)} texts). Python shows what is lost by it.",
            "## While it is served",
            "\n".join(
                (
                    "| minutes | accepted of drafted | steps | swaps | rolled back | plain text |",
                    "|---|---|---|---|---|---|",
                    *(window.row() for window in windows),
                )
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two batches")
    parser.add_argument("--prompts", type=int, default=24, help="of each kind, to measure")
    parser.add_argument("--quick", action="store_true", help="seconds: nothing is learned")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.windows, args.tokens, args.prompts = 0.05, 2, 24, 4
    traffic = Traffic.from_pages(args.prompts)
    prompts = {"prose": traffic.prose, "Python": traffic.code}
    with LLM(**{**KEYS, "draft.kind": "none"}) as llm:
        plain = MeasuredTexts.of(llm, prompts, args.tokens)
        check = MeasuredTexts.of(llm, {"prose": traffic.prose[:STREAMS]}, args.tokens).texts
    with LLM(**KEYS) as llm:
        before = MeasuredTexts.of(llm, prompts, args.tokens)
    config = config_from_keys({**KEYS, "draft.learn": True, "draft.placement": "apart"})
    parts = open_parts_on_ray(config, join=None, report_progress=no_progress)
    assert isinstance(parts.drafter, RemoteDrafter)
    with LLM.from_parts(parts, config) as llm:
        windows = serve(llm, parts.drafter, traffic, check, args)
        after = MeasuredTexts.of(llm, prompts, args.tokens)
    text = page(args, before, after, plain, windows)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
