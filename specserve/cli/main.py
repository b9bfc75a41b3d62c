"""The command line: one function per command. It and `training` alone print.

Exit codes: 0 done, 2 bad usage or config, 1 failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from specserve.cli import training
from specserve.cli.arguments import KEY_LIMITS, build_parser
from specserve.cli.completion import script
from specserve.cli.config_options import config_from_options, draft_notice
from specserve.cli.default_model import default_model_notice
from specserve.cli.generation import generate_text
from specserve.cli.parser import BadUsage, Parser
from specserve.cli.prompt import check_length, check_text, prompt_ids, summary
from specserve.cli.start import INTERRUPTED, quick_exit
from specserve.errors import BadRequest, ConfigError, ModelError, SpecserveError
from specserve.progress import ProgressBar
from specserve.sampling_params import Sampling
from specserve.tools import count_ngrams
from specserve.tools.bench.options import BenchOptions
from specserve.tools.plan.options import PlanOptions

if TYPE_CHECKING:
    from specserve.checkpoint_files import Checkpoints
    from specserve.llm.llm import Output

Command = Callable[[argparse.Namespace], int | None]  # an exit code, or None for 0


def entry() -> NoReturn:
    """Run the command line of this process and exit."""
    code = main(sys.argv[1:])
    if sys.argv[1:2] == ["generate"]:
        quick_exit(code)
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    return run_command(
        build_parser(), lambda options: COMMANDS[options.command](options), arguments
    )


def run_command(parser: Parser, command: Command, arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, by default this process's, run a command and return its exit code.

    Errors become one line on stderr, which begins with the name of the program.
    """
    try:
        return command(parser.parse_args(arguments)) or 0
    except SystemExit as done:  # --help and --version
        return 0 if done.code is None else int(done.code)
    except (BadUsage, ConfigError, BadRequest, ModelError) as error:
        return _print_error(parser.prog, error, code=2)
    except SpecserveError as error:
        return _print_error(parser.prog, error, code=1)
    except OSError as error:  # a file or a connection that no command expects to fail
        text = f"{error.filename or 'the system'}: {error.strerror or error}"
        return _print_error(parser.prog, text, code=1)
    except KeyboardInterrupt:
        return _print_error(parser.prog, "interrupted", code=INTERRUPTED)


def generate(options: argparse.Namespace) -> None:
    """Generate text for one prompt in this process."""
    given: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "speculation": {"gamma": options.gamma, "verifier": options.verifier},
        **({} if options.temperature is None else {"temperature": options.temperature}),
    }
    sampling = Sampling(**given)  # which refuses what cannot be
    check_text(options.prompt)
    config = config_from_options(options)

    def read_prompt(checkpoints: Checkpoints) -> tuple[int, ...]:
        ids = prompt_ids(options.prompt, checkpoints, is_chat=options.chat)
        _note(check_length(len(ids), sampling.max_tokens, checkpoints, config.cache))
        _note(draft_notice(options, config))
        _note(config.demo.note)
        return ids

    def write(text: str) -> None:
        if not options.json:
            print(text, end="", flush=True)

    output, seconds = generate_text(read_prompt, given, config, options.trace, write)
    print(json.dumps(_json_output(output), indent=2) if options.json else "")
    _note(summary(output, seconds))


def serve(options: argparse.Namespace) -> None:
    """Deploy on Ray and serve until interrupted."""
    config = config_from_options(options)
    # Late, as below.
    from specserve.cli.serve import serve_until_ended
    from specserve.cluster.cluster_address import address_to_join

    join = address_to_join(options.join, own_ray=options.own_ray)
    if join is None and (options.replace or options.wait):
        flag = "--replace" if options.replace else "--wait"
        raise BadUsage(f"{flag} is for a Ray cluster that runs; say which with --join ADDRESS")
    serve_until_ended(
        config,
        lambda line: print(line, flush=True),
        _console(),
        join=join,
        replace=options.replace,
        may_wait=options.wait,
        notice=draft_notice(options, config) or default_model_notice(config),
    )


def doctor(options: argparse.Namespace) -> int:
    """Check everything that a server needs. Return 1 if something is bad."""
    # Late, as below.
    from specserve.cluster.cluster_address import address_to_join
    from specserve.tools.doctor.command import examine

    join = address_to_join(options.join, own_ray=options.own_ray)
    with ProgressBar(sys.stderr) as bar:
        report = examine(lambda: config_from_options(options), bar, join=join)
    if options.json:
        print(json.dumps(report.json(), indent=2))
    else:
        _console().print(report.text(), soft_wrap=True)
    return 0 if report.is_well else 1


def bench(options: argparse.Namespace) -> None:
    """Load a running server and print a report."""
    from specserve.tools.bench.command import bench as run_bench

    run_bench(BenchOptions.from_arguments(options), print, sys.stderr)


def tables(options: argparse.Namespace) -> None:
    """Count n-gram tables for a drafter without a model."""
    with ProgressBar(sys.stderr) as bar:
        summary = count_ngrams.count_ngrams(
            options.tokenizer, options.text, options.out, keep=options.keep, report_progress=bar
        )
    print(summary)


def inflate(options: argparse.Namespace) -> None:
    """Write a widened copy of a model."""
    # Late: torch takes seconds to import, and --help and bad usage do not need it.
    from specserve.models.checkpoints.widen import inflate as write_inflated

    with ProgressBar(sys.stderr) as bar:
        num_params = write_inflated(options.model, options.params, options.out, bar)
    print(
        f"{options.out} has {num_params / 1e6:.0f}M parameters; it computes what {options.model} "
        "does, at the cost of a model of that size."
    )


def quantize(options: argparse.Namespace) -> None:
    """Write a copy of a model with small weights."""
    from specserve.tools.quantize import quantize_model  # late, as above

    with ProgressBar(sys.stderr) as bar:
        report = quantize_model(
            options.model,
            options.to,
            options.out,
            text=options.text,
            num_tokens=options.tokens,
            report_progress=bar,
        )
    print(report)


def plan(options: argparse.Namespace) -> None:
    """Predict what speculation gains, and what fits on which GPUs."""
    checked = PlanOptions.from_arguments(options)  # before torch is imported
    from specserve.tools.plan.command import plan as make_plan

    with ProgressBar(sys.stderr) as bar:
        report = make_plan(checked, bar)
    print(report.text())


def keys(options: argparse.Namespace) -> None:
    """Create, list or check API keys."""
    from specserve.tools.api_keys import check_keys, create_key, list_keys

    limits = {
        limit.replace("-", "_"): value
        for limit in KEY_LIMITS
        if (value := getattr(options, limit.replace("-", "_"))) is not None
    }
    if options.action == "create":
        if options.name is None:
            raise BadUsage("say whose key it is: specserve keys create NAME --file FILE")
        settings = {"expires": options.expires, "scopes": options.scopes}
        print(create_key(options.file, options.name, limits, **settings))
        note = f"{options.name} has this new key in {options.file}; it is not shown again"
        print(note, file=sys.stderr)
        return
    if options.name or limits or options.expires or options.scopes:
        raise BadUsage(f"specserve keys {options.action} takes --file alone")
    print((list_keys if options.action == "list" else check_keys)(options.file))


def completion(options: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    print(script(options.shell, build_parser()), end="")


COMMANDS: Mapping[str, Command] = {
    "serve": serve,
    "generate": generate,
    "doctor": doctor,
    "bench": bench,
    "tables": tables,
    "plan": plan,
    "heads": training.heads,
    "eagle": training.eagle,
    "dflash": training.dflash,
    "inflate": inflate,
    "quantize": quantize,
    "keys": keys,
    "completion": completion,
}


def _json_output(output: Output) -> Mapping[str, object]:
    stats = output.stats
    assert stats is not None, "an output without an error has stats"
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": output.finish_reason,
        "stats": asdict(stats)
        | {
            "mean_accepted_length": stats.mean_accepted_length,
            "reproducible": stats.reproducible,
        },
    }


def _console() -> Console:
    """Return the terminal, or the stream; NO_COLOR and TERM=dumb are respected."""
    return Console(highlight=False, markup=False)


def _note(line: str | None) -> None:
    """Print a line for people, on stderr: stdout holds the text alone."""
    if line is not None:
        print(line, file=sys.stderr, flush=True)


def _print_error(program: str, error: object, *, code: int) -> int:
    print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
    return code
