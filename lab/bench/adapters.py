"""The cost of adapters: `python -m lab.bench.adapters`.

The demo target is widened to 200M parameters. It runs without adapters, with adapters that no
request names, and with requests under several adapters and none in one batch, each plain and with
a draft. All variants are open in one process and take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from specserve import LLM, Sampling
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.models.checkpoints.widen import inflate
from specserve.tools.bench.report import machine
from tests.support.adapters import write_adapter

PARAMETERS = 200_000_000
PROMPT_LENGTH = 64
STREAMS = (1, 8)
QUICK_STREAMS = (5,)
NAMES = ("one", "two", "three", "four")
RANK = 8
STRENGTH = 0.02
"""Of an adapter's change: texts become others, and stay ones that the draft can follow."""


@dataclass(frozen=True, slots=True)
class AdapterVariant:
    """A server, and the adapters of its requests in turn; None for a request without one."""

    server: str
    drafter: str
    requests: str
    adapters: tuple[str | None, ...] = (None,)

    @property
    def engine(self) -> str:
        return f"{self.server}, {self.drafter}"

    def sampling(self, streams: int, tokens: int) -> list[Sampling]:
        return [
            Sampling(
                max_tokens=tokens,
                temperature=0,
                ignore_eos=True,
                adapter=self.adapters[i % len(self.adapters)],
            )
            for i in range(streams)
        ]


@dataclass(slots=True)
class AdapterFigures:
    """Tokens a second of a variant, turn by turn, and how many draft tokens were accepted."""

    rates: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"draft.kind": "none"},
    "draft": {"draft.kind": "neural", "draft.path": str(DEMO / "draft")},
}
VARIANTS = tuple(
    variant
    for drafter in DRAFTERS
    for variant in (
        AdapterVariant("without adapters", drafter, "plain"),
        AdapterVariant("with adapters", drafter, "plain"),
        AdapterVariant("with adapters", drafter, "one adapter", NAMES[:1]),
        AdapterVariant("with adapters", drafter, "four adapters and none", (None, *NAMES)),
    )
)


@contextmanager
def opened(
    target: Path, adapters: Mapping[str, str], threads: int, *, quick: bool
) -> Iterator[dict[str, LLM]]:
    own: dict[str, Any] = {
        "target.threads": threads,
        "draft.threads": threads,
        "cache.pages": 256,
        "cache.prefix_caching": False,
        **({"speculation.gamma": 3} if quick else {}),  # nothing is measured at start
    }
    servers = {"without adapters": {}, "with adapters": {"adapters.paths": dict(adapters)}}
    with ExitStack() as stack:
        yield {
            f"{server}, {drafter}": stack.enter_context(LLM(target, **{**own, **keys, **draft}))
            for server, keys in servers.items()
            for drafter, draft in DRAFTERS.items()
        }


def measure(
    models: Mapping[str, LLM], *, streams: int, tokens: int, turns: int
) -> dict[AdapterVariant, AdapterFigures]:
    variants = [variant for variant in VARIANTS if len(variant.adapters) <= streams]
    prompts = list(held_out_prompts(count=streams, length=PROMPT_LENGTH))
    figures = {variant: AdapterFigures() for variant in variants}
    for turn in range(turns + 1):
        for variant in variants:
            sampling = variant.sampling(streams, tokens)
            start = time.perf_counter()
            outputs = models[variant.engine].generate(prompts, sampling)
            seconds = time.perf_counter() - start
            if not turn:  # the first one compiles, loads adapters, and finds gamma
                continue
            own = figures[variant]
            own.rates.append(streams * tokens / seconds)
            stats = [output.stats for output in outputs if output.stats is not None]
            own.drafted += sum(stat.drafted for stat in stats)
            own.accepted += sum(stat.accepted for stat in stats)
    return figures


def table(streams: int, figures: Mapping[AdapterVariant, AdapterFigures]) -> str:
    lines = [
        "| server | drafter | requests | tokens/s | over the server without adapters | "
        "accepted of drafted |",
        "|---|---|---|---|---|---|",
    ]
    for variant, own in figures.items():
        first = next(
            other.rates
            for one, other in figures.items()
            if one.drafter == variant.drafter and one.server == "without adapters"
        )
        lines.append(
            f"| {variant.server} | {variant.drafter} | {variant.requests} | {row(own, first)} |"
        )
    return f"## {streams} stream{'s' * (streams > 1)}\n\n" + "\n".join(lines)


def row(own: AdapterFigures, first: Sequence[float]) -> str:
    """Return the columns of a variant; `first` are the rates of its server without adapters."""
    ratios = [mine / base for mine, base in zip(own.rates, first, strict=True)]
    return (
        f"{median(own.rates):.0f} | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
        f"| {f'{own.accepted / own.drafted:.2f}' if own.drafted else '-'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the small pair: measures nothing")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    turns, tokens = (1, 8) if args.quick else (args.turns, args.tokens)
    threads = 1 if args.quick else args.threads
    with tempfile.TemporaryDirectory() as directory:
        work, target = Path(directory), DEMO / "target"
        if not args.quick:
            inflate(target, PARAMETERS, work / "target")
            target = work / "target"
        adapters = {name: str(work / name) for name in NAMES}
        for seed, path in enumerate(adapters.values()):
            write_adapter(target, Path(path), seed=seed, rank=RANK, alpha=RANK, strength=STRENGTH)
        with opened(target, adapters, threads, quick=args.quick) as models:
            tables = [
                table(streams, measure(models, streams=streams, tokens=tokens, turns=turns))
                for streams in (QUICK_STREAMS if args.quick else STREAMS)
            ]
    text = "\n\n".join(
        (
            "# Adapters",
            "`python -m lab.bench.adapters`",
            f"{date.today()}, {machine()}, {threads} threads, draft and target together;\n"
            f"the demo target {'as it ships' if args.quick else 'widened to 200M parameters'}, "
            f"four adapters of rank {RANK} on every layer, greedy, {tokens} tokens\n"
            f"of each stream with its prompt of {PROMPT_LENGTH}, {turns} turns in which all "
            "variants alternate, medians of each turn's ratio and their range.\n"
            "[Adapters](../guides/adapters.md#what-it-costs) says where the cost comes from.",
            *tables,
        )
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
