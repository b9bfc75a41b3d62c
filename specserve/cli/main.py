"""The command line. Calls and prints; the only place that prints, and that asks how the user likes it (NO_COLOR, TERM).

Exit codes: 0 done, 2 bad usage or config, 1 failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specserve.cli.arguments import BadUsage, config, parser
from specserve.cli.completion import script
from specserve.config.tree import Config
from specserve.errors import BadRequest, ConfigError, ModelError, SpecserveError
from specserve.progress import Bar
from specserve.sampling_params import Sampling
from specserve.terminal import Terminal
from specserve.tools import count_ngrams as tabulate
from specserve.tools.bench.options import Options
from specserve.tools.plan.options import Options as PlanOptions

if TYPE_CHECKING:
    from specserve.llm import Output

Command = Callable[[argparse.Namespace], int | None]  # an exit code, or None for 0


def entry() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    try:
        options = parser().parse_args(arguments)
        return COMMANDS[options.command](options) or 0
    except SystemExit as done:  # --help and --version
        return 0 if done.code is None else int(done.code)
    except (BadUsage, ConfigError, BadRequest, ModelError) as error:
        return _complain(error, code=2)
    except SpecserveError as error:
        return _complain(error, code=1)
    except OSError as error:  # a file or a connection of which nobody thought
        return _complain(f"{error.filename or 'the system'}: {error.strerror or error}", code=1)
    except KeyboardInterrupt:
        return _complain("interrupted", code=1)


def generate(options: argparse.Namespace) -> None:
    """Continues one prompt in this process."""
    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        speculation={"gamma": options.gamma, "verifier": options.verifier},
    )
    output = _continue(options.prompt, sampling, config(options), options.trace)
    print(json.dumps(_described(output), indent=2) if options.json else output.text)


def serve(options: argparse.Namespace) -> None:
    """Deploys on Ray and stays until ended."""
    asked = config(options)
    from specserve.cluster.launch import serve_until_ended  # late, as below

    serve_until_ended(asked, lambda line: print(line, flush=True), _terminal())


def doctor(options: argparse.Namespace) -> int:
    """Looks at everything that a server needs. 1 if something is bad."""
    from specserve.tools.doctor.command import examine  # late, as below

    with Bar(sys.stderr) as bar:
        report = examine(lambda: config(options), bar)
    print(json.dumps(report.json(), indent=2) if options.json else report.text(_terminal()))
    return 0 if report.is_well else 1


def bench(options: argparse.Namespace) -> None:
    """Loads a running server and tells how it did."""
    from specserve.tools.bench.command import bench as load

    load(Options.of(options), print, sys.stderr)


def tables(options: argparse.Namespace) -> None:
    """Counts tables for a drafter without a model."""
    with Bar(sys.stderr) as bar:
        made = tabulate.tabulate(
            options.tokenizer, options.text, options.out, keep=options.keep, tell=bar
        )
    print(made)


def heads(options: argparse.Namespace) -> None:
    """Fits heads to a target."""
    from specserve.tools.train_heads import fit  # late, as below

    out, sizes = (
        options.out,
        {"num_heads": options.heads, "minutes": options.minutes, "threads": options.threads},
    )
    with Bar(sys.stderr) as bar:
        made = fit(options.target, options.text, out, **sizes, tell=bar)
    print(made)


def inflate(options: argparse.Namespace) -> None:
    """Writes a widened copy of a model."""
    from specserve.tools.inflate import (
        inflate as widen,
    )  # torch takes seconds to import; --help and bad usage do not wait for it

    with Bar(sys.stderr) as bar:
        reached = widen(options.model, options.params, options.out, bar)
    print(
        f"{options.out} has {reached / 1e6:.0f}M parameters; it computes what {options.model} does, at the cost of a model of that size."
    )


def plan(options: argparse.Namespace) -> None:
    """Says what speculation would gain, and what fits on which GPUs."""
    asked = PlanOptions.of(options)  # before torch is imported
    from specserve.tools.plan.command import plan as make

    with Bar(sys.stderr) as bar:
        report = make(asked, bar)
    print(report.text())


def reproduce(options: argparse.Namespace) -> None:
    """The tables and figures of the papers, ours beside theirs."""
    from specserve.tools.reproduce.command import reproduce as make

    with Bar(sys.stderr) as bar:
        page = make(options, bar)
    print(page)


def simulate(options: argparse.Namespace) -> None:
    """Plays the engine against simulated devices."""
    from specserve.tools.simulate.report import study

    with Bar(sys.stderr) as bar:
        report = study(options.config, tell=bar)
    print(report.text())
    if options.json is not None:
        options.json.write_text(json.dumps(report.json(), indent=2) + "\n", encoding="utf-8")


def completion(options: argparse.Namespace) -> None:
    """A script for a shell."""
    print(script(options.shell, parser()), end="")


COMMANDS: Mapping[str, Command] = {
    "serve": serve,
    "generate": generate,
    "doctor": doctor,
    "bench": bench,
    "simulate": simulate,
    "tables": tables,
    "plan": plan,
    "reproduce": reproduce,
    "heads": heads,
    "inflate": inflate,
    "completion": completion,
}


def _continue(prompt: str, sampling: Sampling, config: Config, trace: Path | None) -> Output:
    from specserve.engine.trace import Journal  # late for the same reason
    from specserve.llm import LLM
    from specserve.metrics import Registry

    if trace is not None:
        _require_writable(trace)  # before minutes are spent on what cannot be kept
    journal = None if trace is None else Journal(Registry())
    with Bar(sys.stderr) as bar, LLM.of(config, journal, bar) as llm:
        bar("writing")
        (output,) = llm.generate(prompt, sampling)
    if trace is not None and journal is not None:
        trace.write_text(json.dumps(journal.trace()))
    return output


def _require_writable(file: Path) -> None:
    try:
        file.touch()
    except OSError as error:
        raise BadUsage(
            f"cannot write --trace {file}: {error.strerror}; name a file in a directory that exists"
        ) from error


def _described(output: Output) -> Mapping[str, object]:
    assert output.stats is not None, "what has no error has stats"
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": output.finish_reason,
        "stats": asdict(output.stats) | {"mean_accepted_length": output.stats.mean_accepted_length},
    }


def _terminal() -> Terminal:
    """Without colours where NO_COLOR is set to anything: that is its custom."""
    return Terminal(
        sys.stdout, colours=not os.environ.get("NO_COLOR"), dumb=os.environ.get("TERM") == "dumb"
    )


def _complain(error: object, *, code: int) -> int:
    print(f"specserve: {' '.join(str(error).split())}", file=sys.stderr)
    return code
