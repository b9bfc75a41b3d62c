"""Send damaged input of every kind and print how each ended, as a row of a table."""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.chaos.fuzz.outcome import TABLE_HEAD, FuzzOutcome


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of input: the module and function that send it, and how many inputs."""

    module: str
    count: int
    quick: int

    def send(self, count: int, seed: int) -> FuzzOutcome:
        module, _, kind = self.module.partition(":")
        loaded = importlib.import_module(f"tests.chaos.fuzz.{module}")
        fuzz: Callable[[int, int], FuzzOutcome] = getattr(loaded, f"fuzz_{kind or module}")
        return fuzz(count, seed)


KINDS: Mapping[str, Kind] = {
    "frames": Kind("frames", 1_000_000, 200),
    "links": Kind("links", 100_000, 70),
    "requests": Kind("requests", 100_000, 100),
    "sockets": Kind("requests:sockets", 10_000, 20),
    "grammars": Kind("grammars", 10_000, 30),
    "key_files": Kind("key_files", 20_000, 50),
    "config_files": Kind("config_files", 10_000, 20),
    "checkpoints": Kind("checkpoints", 1_000, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Sends damaged input of every kind, and counts the results."
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # not a line for each input
    try:
        print(TABLE_HEAD)
        for name in options.only:
            kind = KINDS[name]
            count = kind.quick if options.quick else kind.count
            print(kind.send(count, options.seed).row, flush=True)
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
