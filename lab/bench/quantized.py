"""Targets and drafts with small weights beside bf16: `python -m lab.bench.quantized`.

The demo target is widened to 200M parameters and quantised; all variants are open in one process
and take turns, at one stream and at eight, plain and with a draft. OpenVINO GenAI, in a process of
its own for each kind of weights, takes its turns between them if
`python -m lab.bench.peers.install openvino` installed it.
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

from lab.bench.peers.comparison import GAMMAS
from lab.bench.peers.entries import python_of
from lab.bench.peers.process import ROOT, PeerFailed, SystemProcess
from lab.bench.peers.turn import TurnRequest
from specserve import LLM, Sampling
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.models.checkpoints.quantize import write_quantized
from specserve.models.checkpoints.widen import inflate
from specserve.models.cpu.linear_kernels import missing_for_compiled
from specserve.tools.bench.report import machine

PARAMETERS = 200_000_000
PROMPT_LENGTH = 64
STREAMS = (1, 8)
TARGETS = ("bf16", "int8", "int4")
PEER = "openvino-genai"
PEER_WEIGHTS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}  # it computes in bf16
Prompts = tuple[tuple[int, ...], ...]
Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """A target, and what drafts for it."""

    target: str
    drafter: str = "plain"
    keys: Keys = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.target}, {self.drafter}"


@dataclass(slots=True)
class Figures:
    """Tokens a second of a variant, turn by turn, and how many draft tokens were accepted."""

    rates: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    is_same_text: bool | None = None  # as that of its target without a draft

    def record_texts(self, is_same: bool) -> None:
        self.is_same_text = is_same and self.is_same_text is not False


@dataclass(slots=True)
class PeerVariant:
    """OpenVINO with one kind of weights, in one mode, with the gamma that gives most."""

    process: SystemProcess
    weights: str
    mode: str
    gammas: tuple[int | None, ...]
    gamma: int | None = None

    @property
    def name(self) -> str:
        return f"{PEER}, {self.weights}, {self.mode}"

    def rate(self, prompts: Prompts, tokens: int) -> float:
        """Return tokens a second, while everybody else rests."""
        self.process.wake()
        try:
            return self.process.rate(TurnRequest(self.mode, self.gamma, prompts, tokens, True))
        finally:
            self.process.rest()

    def choose_gamma(self, prompts: Prompts, tokens: int) -> None:
        """Try each gamma twice, for the first time to compile."""
        rates = {}
        for gamma in self.gammas:
            self.gamma = gamma
            self.rate(prompts, tokens)
            rates[gamma] = self.rate(prompts, tokens)
        self.gamma = max(rates, key=rates.__getitem__)


@dataclass(frozen=True, slots=True)
class Peers:
    """Variants, or the reason why there are none."""

    variants: tuple[PeerVariant, ...] = ()
    absent: str | None = None


def variants(draft: Path, target: Path) -> tuple[Variant, ...]:
    with_draft = {"draft.kind": "neural", "draft.path": str(draft)}
    own = {"draft.kind": "neural", "draft.path": str(target), "draft.quantize": "int4"}
    return (
        *(Variant(name) for name in TARGETS),
        *(Variant(name, "draft in bf16", with_draft) for name in TARGETS),
        Variant("bf16", "draft in int8", {**with_draft, "draft.quantize": "int8"}),
        Variant("bf16", "its own weights in int4", own),
    )


def quick_variants(draft: Path, target: Path) -> tuple[Variant, ...]:
    """Return a plain target, and one with the last drafter, which rounds as it loads."""
    found = [one for one in variants(draft, target) if one.drafter == "plain"][:2]
    last = variants(draft, target)[-1]
    fixed = {**last.keys, "speculation.gamma": 3}  # nothing is measured at start
    return (*found, Variant(last.target, last.drafter, fixed))


@contextmanager
def opened(
    targets: Mapping[str, Path], found: Sequence[Variant], threads: int
) -> Iterator[dict[str, LLM]]:
    own: dict[str, Any] = {
        "target.threads": threads,
        "draft.threads": threads,
        "draft.kind": "none",
        "cache.pages": 256,
        "cache.prefix_caching": False,
    }
    with ExitStack() as stack:
        yield {
            variant.name: stack.enter_context(
                LLM(targets[variant.target], **{**own, **variant.keys})
            )
            for variant in found
        }


@contextmanager
def opened_peers(target: Path, draft: Path, work: Path, *, quick: bool) -> Iterator[Peers]:
    """Start OpenVINO once for each kind of weights, and let it rest."""
    python = python_of(PEER, ROOT)
    if not python.exists():
        yield Peers(absent=f"{PEER} is not installed")
        return
    gammas = GAMMAS[:1] if quick else GAMMAS
    with ExitStack() as stack:
        found: list[PeerVariant] = []
        try:
            for weights in TARGETS[:2] if quick else TARGETS:
                command = (python, "-m", "lab.bench.peers.openvino", "--target", target)
                own = ("--draft", draft, "--work", work / f"openvino-{weights}")
                kind = ("--weights", PEER_WEIGHTS[weights])
                process = SystemProcess(list(map(str, (*command, *own, *kind))))
                stack.enter_context(process)
                process.about()  # it has converted
                process.rest()
                found += [
                    PeerVariant(process, weights, "plain", (None,)),
                    PeerVariant(process, weights, "draft", gammas),
                ]
        except PeerFailed as error:
            yield Peers(absent=f"{PEER}: {error}")
        else:
            yield Peers(tuple(found))


def measure(
    models: Mapping[str, LLM],
    found: Sequence[Variant],
    peers: Sequence[PeerVariant],
    *,
    streams: int,
    tokens: int,
    turns: int,
) -> dict[str, Figures]:
    prompts = held_out_prompts(count=streams, length=PROMPT_LENGTH)
    names = [*(variant.name for variant in found), *(peer.name for peer in peers)]
    figures = {name: Figures() for name in names}
    for peer in peers:
        peer.choose_gamma(prompts, tokens)
    sampling = Sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
    for turn in range(turns + 1):
        texts: dict[str, list[tuple[int, ...]]] = {}
        for variant in found:
            start = time.perf_counter()
            outputs = models[variant.name].generate(list(prompts), sampling)
            seconds = time.perf_counter() - start
            own = [tuple(output.token_ids) for output in outputs]
            first = texts.setdefault(variant.target, own)
            if not turn:  # the first one compiles, and finds gamma
                continue
            of_variant = figures[variant.name]
            of_variant.rates.append(streams * tokens / seconds)
            of_variant.record_texts(own == first)
            stats = [output.stats for output in outputs if output.stats is not None]
            of_variant.drafted += sum(stat.drafted for stat in stats)
            of_variant.accepted += sum(stat.accepted for stat in stats)
        if turn:
            for peer in peers:
                figures[peer.name].rates.append(peer.rate(prompts, tokens))
    return figures


def table(
    streams: int,
    found: Sequence[Variant],
    peers: Sequence[PeerVariant],
    figures: Mapping[str, Figures],
) -> str:
    lines = [
        "| target | drafter | tokens/s | over bf16, plain | accepted of drafted | plain text |",
        "|---|---|---|---|---|---|",
    ]
    first = figures[found[0].name].rates
    for variant in found:
        lines.append(
            f"| {variant.target} | {variant.drafter} | {row(figures[variant.name], first)} |"
        )
    for peer in peers:
        mode = peer.mode if peer.gamma is None else f"{peer.mode}, gamma {peer.gamma}"
        lines.append(f"| {PEER}, {peer.weights} | {mode} | {row(figures[peer.name], first)} |")
    return f"## {streams} stream{'s' * (streams > 1)}\n\n" + "\n".join(lines)


def row(own: Figures, first: Sequence[float]) -> str:
    """Return the columns of a variant; `first` are the rates of bf16 without a draft."""
    ratios = [mine / base for mine, base in zip(own.rates, first, strict=True)]
    same = {None: "-", True: "the same", False: "another"}[own.is_same_text]
    return (
        f"{median(own.rates):.0f} | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
        f"| {f'{own.accepted / own.drafted:.2f}' if own.drafted else '-'} | {same}"
    )


def write_targets(work: Path, parameters: int | None) -> dict[str, Path]:
    """Write the target in each kind of weights; without a size, as it ships."""
    plain = DEMO / "target"
    if parameters is not None:
        inflate(plain, parameters, work / "bf16")
        plain = work / "bf16"
    for to in TARGETS[1:]:
        write_quantized(plain, to, work / to)
    return {"bf16": plain, **{to: work / to for to in TARGETS[1:]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="the small pair: measures nothing")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    turns, tokens = (1, 8) if args.quick else (args.turns, args.tokens)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        targets = write_targets(work, None if args.quick else PARAMETERS)
        choose = quick_variants if args.quick else variants
        found = choose(DEMO / "draft", targets["bf16"])
        with (
            opened_peers(targets["bf16"], DEMO / "draft", work, quick=args.quick) as peers,
            opened(targets, found, args.threads) as models,
        ):
            tables = []
            for streams in STREAMS:
                figures = measure(
                    models, found, peers.variants, streams=streams, tokens=tokens, turns=turns
                )
                tables.append(table(streams, found, peers.variants, figures))
    missing = missing_for_compiled()
    text = "\n\n".join(
        (
            "# Quantised targets and drafts",
            "`python -m lab.bench.quantized`",
            f"{date.today()}, {machine()}, {args.threads} threads, draft and target together; "
            f"the demo target {'as it ships' if args.quick else 'widened to 200M parameters'}, "
            f"greedy, {tokens} tokens of each stream with its prompt of {PROMPT_LENGTH}, {turns} "
            "turns in which all variants alternate, medians of each turn's ratio and their range.",
            *([f"Small weights are widened here: the kernel needs {missing}."] if missing else []),
            *([f"Without a peer: {peers.absent}."] if peers.absent else []),
            *tables,
        )
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
