"""The arguments of every command, and their values. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

from specserve import __version__
from specserve.cli import training
from specserve.cli.completion import SHELLS
from specserve.cli.config_options import add_config
from specserve.cli.examples import epilog, overview
from specserve.cli.parser import Parser
from specserve.config.demo import parse_parameters
from specserve.tools import count_ngrams
from specserve.tools.bench.options import add_options as add_bench
from specserve.tools.plan.options import add_arguments as add_plan

AddArguments = Callable[[argparse.ArgumentParser], None]
KEY_LIMITS = {
    "requests-per-minute": "requests that may begin in a minute",
    "tokens-per-minute": "tokens of prompts and texts in a minute",
    "concurrent-requests": "requests under way at a time",
}


def build_parser() -> Parser:
    """Build the parser. Its result has the name of the command in `command`."""
    parser = Parser(
        prog="specserve",
        description="Serves language models by distributed speculative decoding.",
        epilog=overview(),
    )
    parser.add_argument("--version", action="version", version=f"specserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (add_arguments, summary) in _commands().items():
        description = summary[0].upper() + summary[1:] + "."
        add_arguments(
            commands.add_parser(name, help=summary, description=description, epilog=epilog(name))
        )
    return parser


def parse_count(text: str) -> int:
    """Parse a number of parameters such as 200M, 1.5B or 8e9."""
    try:
        return parse_parameters(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a number of parameters is written 200M, 1B or 8e9, not {text!r}"
        ) from None


def _commands() -> dict[str, tuple[AddArguments, str]]:
    return {
        "serve": (_add_serve, "serve the models over HTTP, at http://127.0.0.1:8000 by default"),
        "generate": (_add_generate, "continue one prompt in this process"),
        "doctor": (
            _add_doctor,
            "check this machine, the config and the models, and say what to do",
        ),
        "bench": (partial(add_bench, gamma=_gamma), "load a running server and measure it"),
        "tables": (
            count_ngrams.add_arguments,
            "count tables for draft.kind unigram, bigram and max_gram",
        ),
        "plan": (add_plan, "ask theory and memory before anything runs"),
        "heads": (training.add_heads, "fit heads to a target, for draft.kind heads"),
        "eagle": (training.add_eagle, "train an EAGLE-3 head for a target, for draft.kind eagle"),
        "dflash": (
            training.add_dflash,
            "train a DFlash or DSpark draft for a target, for draft.kind dflash",
        ),
        "inflate": (_add_inflate, "write a widened copy that costs what a larger model costs"),
        "quantize": (_add_quantize, "write a copy with weights in 8 or 4 bits"),
        "keys": (_add_keys, "create, list and check keys in a file for http.api_keys_file"),
        "completion": (_add_completion, "print a shell completion script"),
    }


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    _add_server(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="with --join: replace the application of that name, which is refused otherwise",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="with --join: wait for nodes instead of ending with an error when there is no room",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tp", type=int, metavar="N", help="tensor parallel degree of the target; 1 by default"
    )
    parser.add_argument("--host", metavar="H", help="address to listen on; 127.0.0.1 by default")
    parser.add_argument("--port", type=int, metavar="P", help="port of it; 8000 by default")
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="of the application in Ray; specserve-MODEL-PORT by default",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--own-ray",
        action="store_true",
        help="start a Ray for this server alone; the default unless RAY_ADDRESS is set",
    )
    which.add_argument(
        "--join",
        metavar="ADDRESS",
        help="deploy on the Ray cluster at HOST:PORT, or on the one of this machine (auto)",
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="the prompt is a user's message; the default for a model with a chat template",
    )
    add_config(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="tokens to write at most"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is greedy; the model's own, or 1, by default",
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="makes the text repeatable; by default it is not"
    )
    _add_drafting(parser)
    parser.add_argument("--json", action="store_true", help="print token ids and statistics too")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what each round did, for Perfetto and python -m specserve.tools.timeline",
    )


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gamma",
        type=_gamma,
        metavar="N",
        help="draft tokens a round; 0 is plain decoding, auto is the default",
    )
    parser.add_argument(
        "--verifier",
        metavar="V",
        help="auto, which is the default, speculative, block, coupled or lenient",
    )
    parser.add_argument(
        "--drafter",
        metavar="D",
        help="what drafts: neural, layer_skip, heads, eagle, dflash, bigram, unigram, max_gram, "
        "prompt_copy, random or none; by default neural if there is a draft",
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    _add_server(parser)
    parser.add_argument("--json", action="store_true", help="print the findings for programs")


def _add_inflate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="the model to widen"
    )
    parser.add_argument(
        "--params", type=parse_count, required=True, metavar="N", help="such as 200M, 1B or 8e9"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for the copy"
    )


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR-OR-HUB-NAME", help="the model to copy"
    )
    parser.add_argument(
        "--to", choices=("int8", "int4", "fp8"), required=True, help="what weights become"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory for the copy"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text on which the copy is compared; modules of Python's library if left out",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of it",
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("create", "list", "check"),
        help="print a new key of NAME, which is added to the file; print names and limits, and no "
        "keys; or print what is wrong with the file",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the client of a new key")
    parser.add_argument(
        "--file", type=Path, required=True, metavar="FILE", help="that of http.api_keys_file"
    )
    for limit, meaning in KEY_LIMITS.items():
        parser.add_argument(f"--{limit}", type=int, metavar="N", help=f"of NAME: {meaning}")
    parser.add_argument(
        "--expires", type=_day, metavar="YYYY-MM-DD", help="the new key's last day (UTC)"
    )
    parser.add_argument(
        "--scopes",
        metavar="A,B",
        help="what the new key may be used for: some of generate,trace,metrics,adapters; "
        "all but the last by default",
    )


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that will read the script")


def _gamma(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number or auto, not {text!r}") from None


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a day is written 2027-01-31, not {text!r}") from None
