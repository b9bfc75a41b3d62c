"""Generate the one text of `specserve generate`, and write the trace of its rounds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.cli.parser import BadUsage
from specserve.cli.start import quick_start
from specserve.config.tree import Config
from specserve.progress import ProgressBar

if TYPE_CHECKING:
    from specserve.api.continuation import OutputDelta
    from specserve.checkpoint_files import Checkpoints
    from specserve.llm.llm import Output


def generate_text(
    read_prompt: Callable[[Checkpoints], tuple[int, ...]],
    given: Mapping[str, Any],
    config: Config,
    trace: Path | None,
    write: Callable[[str], None],
) -> tuple[Output, float]:
    """Write the text as it comes; return the output, and the seconds of all but loading.

    `read_prompt` gets the files of the models before they are loaded. What of the sampling is not
    `given` is as the model recommends it.
    """
    prompt: list[int] = []
    if trace is not None:
        _require_writable(trace)  # before minutes are spent on a trace that cannot be saved
    with quick_start(config):
        import specserve.llm.inprocess  # noqa: F401  # what LLM imports when it opens
        from specserve.engine.trace import TraceJournal  # late, like torch
        from specserve.llm.llm import LLM
        from specserve.metrics import Registry

    journal = None if trace is None else TraceJournal(Registry())
    with ProgressBar(sys.stderr) as bar:
        llm = LLM.from_config(config, journal, bar, lambda files: prompt.extend(read_prompt(files)))
    with llm:
        start = time.perf_counter()
        output = _written(llm.stream(prompt, replace(llm.default_sampling, **given)), write)
        seconds = time.perf_counter() - start
    if trace is not None and journal is not None:
        trace.write_text(json.dumps(journal.trace()))
    return output, seconds


def _written(deltas: Generator[OutputDelta, None, Output], write: Callable[[str], None]) -> Output:
    while True:
        try:
            delta = next(deltas)
        except StopIteration as end:
            output: Output = end.value
            return output
        write(delta.text)


def _require_writable(file: Path) -> None:
    try:
        file.touch()
    except OSError as error:
        raise BadUsage(
            f"cannot write --trace {file}: {error.strerror}; name a file in a directory that exists"
        ) from error
