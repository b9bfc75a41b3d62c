"""Sections of a run on a card: one that fails takes no other down, and every result is kept."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

Results = Mapping[str, object]
Section = Callable[["Scale"], Results]
MAX_TRACE_LINES = 12


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run: all of it, or a rehearsal that only shows that it runs."""

    is_small: bool
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))


def run_sections(step: str, sections: Mapping[str, Section], scale: Scale, out: Path) -> bool:
    """Run sections, keep their results in `<step>.json`, and return whether none failed."""
    kept: dict[str, dict[str, object]] = {}
    has_failed = False
    out.mkdir(parents=True, exist_ok=True)
    for name, section in sections.items():
        started = time.perf_counter()
        try:
            found: dict[str, object] = dict(section(scale))
        except Exception as error:  # the others may still show something
            lines = traceback.format_exc().splitlines()[-MAX_TRACE_LINES:]
            has_failed = True
            found = {"failed": f"{type(error).__name__}: {error}", "trace": lines}
        seconds = round(time.perf_counter() - started, 1)
        kept[name] = {"seconds": seconds, "results": found}
        # after each, so that what a time limit cuts off loses nothing
        (out / f"{step}.json").write_text(json.dumps(kept, indent=1, default=str) + "\n")
        verdict = "FAILED" if "failed" in found else "done"
        print(f"{step}: {name}: {verdict} in {seconds} s", flush=True)
        for key, value in found.items():
            print(f"    {key}: {value}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return not has_failed
