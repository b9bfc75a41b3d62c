"""Generate the one text of `specserve generate`, and write the trace of its rounds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.cli.parser import BadUsage
from specserve.cli.start import quick_start
from specserve.config.tree import Config
from specserve.progress import ProgressBar
from specserve.sampling_params import Sampling

if TYPE_CHECKING:
    from specserve.checkpoint_files import Checkpoints
    from specserve.llm.llm import Output


def generate_text(
    prompt: str,
    sampling: Sampling,
    config: Config,
    trace: Path | None,
    require: Callable[[Checkpoints], None],
) -> tuple[Output, float]:
    """Return the output, and the seconds that its text took once the models were loaded.

    `require` gets their files before.
    """
    if trace is not None:
        _require_writable(trace)  # before minutes are spent on a trace that cannot be saved
    with quick_start(config):
        import specserve.llm.inprocess  # noqa: F401  # what LLM imports when it opens
        from specserve.engine.trace import TraceJournal  # late, like torch
        from specserve.llm.llm import LLM
        from specserve.metrics import Registry

    journal = None if trace is None else TraceJournal(Registry())
    with (
        ProgressBar(sys.stderr) as bar,
        LLM.from_config(config, journal, bar, require) as llm,
    ):
        bar("writing")
        start = time.perf_counter()
        (output,) = llm.generate(prompt, sampling)
        seconds = time.perf_counter() - start
    if trace is not None and journal is not None:
        trace.write_text(json.dumps(journal.trace()))
    return output, seconds


def _require_writable(file: Path) -> None:
    try:
        file.touch()
    except OSError as error:
        raise BadUsage(
            f"cannot write --trace {file}: {error.strerror}; name a file in a directory that exists"
        ) from error
