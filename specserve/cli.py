"""The command line. Parses, calls, prints; the only place that prints. Exit codes: 0 done, 2 bad usage or config, 1 failure."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specserve import __version__, tabulate
from specserve.bench.options import Options, add_options
from specserve.config import Config, load, override
from specserve.errors import BadRequest, ConfigError, ModelError, SpecserveError
from specserve.planning.options import Options as PlanOptions
from specserve.planning.options import add_arguments as add_plan
from specserve.reproduce.options import add_arguments as add_reproduce
from specserve.request import Sampling

if TYPE_CHECKING:
    from specserve.llm import Output

EXAMPLES = """examples:
  specserve generate --prompt 'def add(a, b):' --max-tokens 64 --temperature 0
  specserve generate --prompt 'import os' --target meta-llama/Llama-3.1-8B --draft meta-llama/Llama-3.2-1B --gamma 5
  specserve generate --prompt 'import os' --seed 1 --json --set cache.page_size=32
  specserve inflate --model specserve/demo/target --params 200M --out /tmp/target-200M
  specserve plan --target specserve/demo/target --draft specserve/demo/draft --measure
  specserve bench --url http://127.0.0.1:8000 --concurrency 16 --html report.html
"""
Command = Callable[[argparse.Namespace], None]
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BadUsage(Exception):
    """What argparse finds wrong with the arguments."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of a line behind pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message} (see {self.prog} --help)")


def entry() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    try:
        options = _parser().parse_args(arguments)
        command: Command = options.command
        command(options)
    except SystemExit as done:  # --help and --version
        return 0 if done.code is None else int(done.code)
    except (BadUsage, ConfigError, BadRequest, ModelError) as error:
        return _complain(error, code=2)
    except SpecserveError as error:
        return _complain(error, code=1)
    except KeyboardInterrupt:
        return _complain("interrupted", code=1)
    return 0


def generate(options: argparse.Namespace) -> None:
    """Continues one prompt in this process."""
    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        speculation={"gamma": options.gamma, "verifier": options.verifier},
    )
    output = _continue(options.prompt, sampling, _config(options), options.trace)
    print(json.dumps(_described(output), indent=2) if options.json else output.text)


def serve(options: argparse.Namespace) -> None:
    """Deploys on Ray and stays until ended."""
    from specserve.cluster.launch import serve_until_ended  # late, as below

    serve_until_ended(_config(options), lambda line: print(line, flush=True))


def bench(options: argparse.Namespace) -> None:
    """Loads a running server and tells how it did."""
    from specserve.bench.command import bench as load

    load(Options.of(options), print, sys.stderr)


def tables(options: argparse.Namespace) -> None:
    """Counts tables for a drafter without a model."""
    print(tabulate.tabulate(options.tokenizer, options.text, options.out, keep=options.keep))


def heads(options: argparse.Namespace) -> None:
    """Fits heads to a target."""
    from specserve.fitting import fit  # late, as below

    out, sizes = options.out, {"num_heads": options.heads, "minutes": options.minutes, "threads": options.threads}
    print(fit(options.target, options.text, out, **sizes, tell=lambda line: print(line, file=sys.stderr, flush=True)))


def inflate(options: argparse.Namespace) -> None:
    """Writes a widened copy of a model."""
    from specserve.models.inflate import inflate as widen  # torch takes seconds to import; --help and bad usage do not wait for it

    reached = widen(options.model, options.params, options.out)
    print(f"{options.out} has {reached / 1e6:.0f}M parameters; it computes what {options.model} does, at the cost of a model of that size.")


def plan(options: argparse.Namespace) -> None:
    """Says what speculation would gain, and what fits on which GPUs."""
    asked = PlanOptions.of(options)  # before torch is imported
    from specserve.planning.command import plan as make

    print(make(asked).text())


def reproduce(options: argparse.Namespace) -> None:
    """The tables and figures of the papers, ours beside theirs."""
    from specserve.reproduce.command import reproduce as make

    print(make(options, lambda line: print(line, file=sys.stderr, flush=True)))


def simulate(options: argparse.Namespace) -> None:
    """Plays the engine against simulated devices."""
    from specserve.simulate.report import study

    report = study(options.config, tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(report.text())
    if options.json is not None:
        options.json.write_text(json.dumps(report.json(), indent=2) + "\n", encoding="utf-8")


def _continue(prompt: str, sampling: Sampling, config: Config, trace: Path | None) -> Output:
    from specserve.engine.journal import Journal  # late for the same reason
    from specserve.llm import LLM
    from specserve.metrics import Registry

    if trace is not None:
        _require_writable(trace)  # before minutes are spent on what cannot be kept
    journal = None if trace is None else Journal(Registry())
    with LLM.of(config, journal) as llm:
        (output,) = llm.generate(prompt, sampling)
    if trace is not None and journal is not None:
        trace.write_text(json.dumps(journal.trace()))
    return output


def _require_writable(file: Path) -> None:
    try:
        file.touch()
    except OSError as error:
        raise BadUsage(f"cannot write {file}: {error.strerror}") from error


def _described(output: Output) -> Mapping[str, object]:
    assert output.stats is not None, "what has no error has stats"
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": output.finish_reason,
        "stats": asdict(output.stats) | {"mean_accepted_length": output.stats.mean_accepted_length},
    }


def _config(options: argparse.Namespace) -> Config:
    """The file, then `--set`, then the options that are keys of the config under a shorter name."""
    short = {key: getattr(options, name, None) for name, key in SHORT_NAMES.items()}
    return load(options.config, dict(options.set) | {key: value for key, value in short.items() if value is not None})


SHORT_NAMES = {
    "target": "target.path",
    "draft": "draft.path",
    "drafter": "draft.kind",
    "tp": "target.tensor_parallel",
    "host": "http.host",
    "port": "http.port",
}


def _parser() -> Parser:
    parser = Parser(
        prog="specserve", description="Serves language models by distributed speculative decoding.", epilog=EXAMPLES, formatter_class=_Plain
    )
    parser.add_argument("--version", action="version", version=f"specserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve the models over HTTP", formatter_class=_Plain))
    _add_generate(commands.add_parser("generate", help="continue one prompt in this process", epilog=EXAMPLES, formatter_class=_Plain))
    add_bench = commands.add_parser("bench", help="load a running server and measure it", formatter_class=_Plain)
    add_options(add_bench, gamma=_gamma)
    add_bench.set_defaults(command=bench)
    _add_simulate(commands.add_parser("simulate", help="ask how many replicas and devices a load needs", formatter_class=_Plain))
    _add_tables(commands.add_parser("tables", help="count tables for draft.kind unigram, bigram and max_gram", formatter_class=_Plain))
    _add(commands.add_parser("plan", help="ask theory and memory before anything runs", formatter_class=_Plain), add_plan, plan)
    _add(
        commands.add_parser("reproduce", help="the papers' tables, ours beside theirs", formatter_class=_Plain),
        partial(add_reproduce, count=count),
        reproduce,
    )
    _add_heads(commands.add_parser("heads", help="fit heads to a target, for draft.kind heads", formatter_class=_Plain))
    _add_inflate(commands.add_parser("inflate", help="write a widened copy that costs what a larger model costs", formatter_class=_Plain))
    return parser


def _add(parser: argparse.ArgumentParser, arguments: Callable[[argparse.ArgumentParser], None], command: Command) -> None:
    arguments(parser)
    parser.set_defaults(command=command)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--tp", type=int, metavar="N", help="tensor parallel degree of the target")
    parser.add_argument("--host", metavar="H")
    parser.add_argument("--port", type=int, metavar="P")
    parser.set_defaults(command=serve)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    _add_config(parser)
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy")
    parser.add_argument("--seed", type=int, metavar="S", help="makes the text repeatable")
    parser.add_argument("--gamma", type=_gamma, metavar="N", help="draft tokens a round; 0 is plain decoding, auto is the default")
    parser.add_argument("--verifier", metavar="V", help="speculative, block, coupled or lenient")
    parser.add_argument(
        "--drafter", metavar="D", help="what drafts: neural, layer_skip, heads, bigram, unigram, max_gram, prompt_copy, random or none"
    )
    parser.add_argument("--json", action="store_true", help="print token ids and statistics too")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write what each round did, for Perfetto and python -m specserve.bench.timeline")
    parser.set_defaults(command=generate)


def _add_tables(parser: argparse.ArgumentParser) -> None:
    tabulate.add_arguments(parser)
    parser.set_defaults(command=tables)


def _add_heads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="M", help="a local directory or a hub name")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8, such as the target is to write")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for draft.path")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="tokens that are guessed at once")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="that the fitting takes, once the texts have been read")
    parser.add_argument("--threads", type=int, metavar="N", help="of a CPU")
    parser.set_defaults(command=heads)


def _add_inflate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--params", type=count, required=True, metavar="N", help="such as 200M, 1B or 8e9")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.set_defaults(command=inflate)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML, such as deploy/simulate-70b.yaml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case that was simulated, in full")
    parser.set_defaults(command=simulate)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; see docs/architecture.md")
    parser.add_argument("--target", metavar="M", help="a local directory or a hub name; the demo pair's by default")
    parser.add_argument("--draft", metavar="M", help="likewise")
    parser.add_argument(
        "--set", type=_override, action="append", default=[], metavar="a.b=c", help="any key of the config, such as speculation.gamma=5"
    )


def count(text: str) -> int:
    """200M, 1.5B, 8e9 as a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"a number of parameters is written 200M, 1B or 8e9, not {text!r}")
    return round(float(match[1]) * UNITS[match[2].upper()])


def _gamma(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number or auto, not {text!r}") from None


def _override(argument: str) -> tuple[str, object]:
    try:
        return override(argument)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _complain(error: object, *, code: int) -> int:
    print(f"specserve: {' '.join(str(error).split())}", file=sys.stderr)
    return code


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples as they are."""
