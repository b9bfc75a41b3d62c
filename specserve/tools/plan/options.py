"""Options of `specserve plan` and their checks. Knows no models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from specserve.errors import BadValue
from specserve.tools.plan.cascades import CascadeStage

DTYPES = ("bfloat16", "float16", "float32")
DRAFT_QUANTIZE = ("int8", "int4", "fp8")
HIT_RATE = 0.8
"""Between greedy and sampled streams, see docs/measurements/pipeline-speed.md."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options as given; None marks those that were left out."""

    target: str | None
    draft: str | None
    draft_quantize: str | None
    alpha: float | None
    cost: float | None
    hit_rate: float
    max_gamma: int
    stages: tuple[CascadeStage, ...]
    gpus: tuple[str, ...]
    dtype: str
    context: int | None
    page_size: int
    memory_fraction: float | None
    measure: bool
    text: Path | None
    tokens: int
    threads: int | None
    json: Path | None
    plot: Path | None
    config: Path | None = None

    @classmethod
    def from_arguments(cls, given: argparse.Namespace) -> PlanOptions:
        """Return the options. Raises BadValue for combinations that make no sense."""
        values = {field.name: getattr(given, field.name) for field in fields(cls)}
        options = cls(
            **values | {"stages": _stages(given.stages or ()), "gpus": tuple(given.gpus or ())}
        )
        if options.measure and (options.alpha is not None or options.cost is not None):
            raise BadValue(
                "--measure finds alpha and c itself; leave --alpha and --cost out", param="measure"
            )
        if options.measure and options.text is None and options.target is not None:
            raise BadValue(
                "--measure needs --text, a file that neither model has learnt from", param="text"
            )
        if options.text is not None and not options.measure:
            raise BadValue("--text is read with --measure only", param="text")
        if len(options.gpus) > 2:
            raise BadValue(
                "--gpus takes one or two groups, the target's and, if they are others, the "
                f"draft's, not {len(options.gpus)}",
                param="gpus",
            )
        return options


def _stages(given: Sequence[CascadeStage]) -> tuple[CascadeStage, ...]:
    if len(given) == 1:
        raise BadValue(
            "--stages needs two or more; one draft is --alpha and --cost", param="stages"
        )
    for i, stage in enumerate(given):
        if len(stage.alphas) > i + 1:
            reviewers = f"the target and {i} above it" if i else "the target alone"
            raise BadValue(
                f"--stages: stage {i + 1} is reviewed by {reviewers}, and has {len(stage.alphas)} "
                "alphas; give one for each reviewer",
                param="stages",
            )
    return tuple(_filled(one, place) for place, one in enumerate(given))


def _filled(stage: CascadeStage, place: int) -> CascadeStage:
    """Return the stage with an alpha for each reviewer; the last one given is repeated."""
    return CascadeStage(
        stage.alphas + stage.alphas[-1:] * (place + 1 - len(stage.alphas)), stage.cost
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    _add_models(parser)
    _add_assumptions(parser)
    _add_room(parser)
    _add_measurement(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the factors; PNG, SVG or PDF by its ending"
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="M",
        help="directory with config.json, with or without weights, or hub name; default: demo pair",
    )
    parser.add_argument("--draft", metavar="M", help="the same for the draft")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a server's config: the devices that its engines and gateways ask for, by model",
    )
    parser.add_argument(
        "--draft-quantize",
        choices=DRAFT_QUANTIZE,
        help="round the draft's weights as they are read, as draft.quantize does",
    )


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alpha", type=share, metavar="A", help="how often a draft token is accepted, 0 to 1"
    )
    parser.add_argument(
        "--cost",
        type=cost,
        metavar="C",
        help="time of a draft pass / of a target pass; by default the ratio of their parameters",
    )
    parser.add_argument(
        "--hit-rate",
        type=share,
        default=HIT_RATE,
        metavar="H",
        help="share of proposals that are ready in time",
    )
    parser.add_argument(
        "--max-gamma", type=positive, default=16, metavar="N", help="most draft tokens a round"
    )
    parser.add_argument(
        "--stages",
        type=stage,
        nargs="+",
        metavar="A[,A]:C",
        help="a cascade, from the largest draft to the smallest: how often the target accepts its "
        "tokens, then each stage above it, and its cost",
    )


def _add_room(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        nargs="+",
        metavar="NxG",
        help="such as 4x80 (GiB each) or 4xH100; then the draft's, if they are others",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of weights and of the KV cache"
    )
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="positions that a sequence takes; by default the model's, but at most 8192",
    )
    parser.add_argument(
        "--page-size", type=positive, default=16, metavar="N", help="positions of a page"
    )
    parser.add_argument(
        "--memory-fraction",
        type=share,
        metavar="F",
        help="for pages, of what is free beside the weights; by default the engine's",
    )


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", action="store_true", help="run both models on --text, and measure alpha and c"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8; for the demo pair, by default, what it was not trained on",
    )
    parser.add_argument(
        "--tokens", type=positive, default=4096, metavar="N", help="of the text, from its beginning"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="of a CPU; torch's by default"
    )


def share(text: str) -> float:
    """Return a number from 0 to 1."""
    number = cost(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"a number from 0 to 1, not {text!r}")
    return number


def cost(text: str) -> float:
    """Return a finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number from 0 on, not {text!r}")
    return number


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not {text!r}")
    return int(text)


def stage(text: str) -> CascadeStage:
    """Return the stage of a text such as 0.6,0.7:0.01: alphas, the target's first, and cost."""
    alphas, colon, price = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(
            f"a stage is written alpha:cost, such as 0.6:0.01, not {text!r}"
        )
    return CascadeStage(tuple(share(alpha) for alpha in alphas.split(",")), cost(price))
