"""The options of `specserve bench` and their checks. Imports nothing that takes time."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from specserve.errors import BadValue

DEFAULT_CONCURRENCY, DEFAULT_WARM_UP = 8, 4


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Checked options. Raises BadValue naming the option that makes no sense."""

    url: str
    model: str | None = None  # the server's first
    concurrency: int | None = None  # DEFAULT_CONCURRENCY without a rate
    rate: float | None = None
    requests: int = 64
    max_tokens: int = 128
    prompts: Path | None = None
    chat: bool | None = None  # as the model has a chat template or none
    temperature: float = 0.0
    seed: int | None = None
    gamma: int | str | None = None
    ignore_eos: bool = True
    warm_up: int | None = None  # requests that do not count; by default one per client
    timeout: float = 600.0
    api_key_file: Path | None = None
    json: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rate is not None:
            raise BadValue(
                "--concurrency and --rate are two ways to load; give one of them", param="rate"
            )
        for name, least in (
            ("concurrency", 1),
            ("requests", 1),
            ("max_tokens", 1),
            ("warm_up", 0),
            ("gamma", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise BadValue(f"{_option(name)} must be {least} or more, not {value}", param=name)
        for name in ("rate", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadValue(f"{_option(name)} must be above 0, not {value:g}", param=name)
        if not 0 <= self.temperature < math.inf:
            raise BadValue(
                f"--temperature must be 0 or more, not {self.temperature:g}", param="temperature"
            )
        for name, file in (("json", self.json), ("html", self.html)):
            if file is not None and not _can_write(file):
                raise BadValue(
                    f"--{name} {file} cannot be written; name a file in a directory that is yours",
                    param=name,
                )

    @classmethod
    def from_arguments(cls, parsed: argparse.Namespace) -> BenchOptions:
        """Take the fields from parsed arguments."""
        return cls(**{field.name: getattr(parsed, field.name) for field in fields(cls)})

    @property
    def clients(self) -> int | None:
        """Number of clients of a closed loop, or None if requests arrive at a rate."""
        return None if self.rate is not None else self.concurrency or DEFAULT_CONCURRENCY

    @property
    def num_warm_up(self) -> int:
        return self.warm_up if self.warm_up is not None else self.clients or DEFAULT_WARM_UP

    def as_dict(self) -> dict[str, object]:
        """Return all options as JSON values, for the report."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }

    def command_line(self) -> str:
        """Return the command as one would type it, without options at their defaults."""
        words = ["specserve", "bench"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is False:
                words.append("--no-" + field.name.replace("_", "-"))
            elif value is True and value != field.default:
                words.append(_option(field.name))
            elif value != field.default:
                words += [
                    _option(field.name),
                    f"{value:g}" if isinstance(value, float) else str(value),
                ]
        return shlex.join(words)


def add_options(parser: argparse.ArgumentParser, *, gamma: Callable[[str], int | str]) -> None:
    """Add the options of the command; `gamma` parses a number or `auto`."""
    _add_server(parser)
    _add_load(parser)
    _add_sampling(parser, gamma)
    _add_results(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        required=True,
        metavar="U",
        help="URL of a running server, such as http://127.0.0.1:8000",
    )
    add(
        "--model",
        metavar="NAME",
        help="model to load, or an adapter; the server's first by default",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="clients, each of which sends its next request once answered; "
        f"{DEFAULT_CONCURRENCY} by default",
    )
    load.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="instead: requests per second, arriving at random (Poisson)",
    )
    add("--requests", type=int, default=64, metavar="N", help="number of requests; 64 by default")
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens per request; 128 by default",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one prompt per line, or JSON lines with "prompt"; beginnings of Python code, or '
        "questions in chats, by default",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="each prompt is a user's message; the default where the server says that the model "
        "has a chat template",
    )


def _add_sampling(parser: argparse.ArgumentParser, gamma: Callable[[str], int | str]) -> None:
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0, greedy, by default")
    add(
        "--seed",
        type=int,
        metavar="S",
        help="seed of the arrivals and, above temperature 0, of the requests: number i gets S + i",
    )
    add(
        "--gamma",
        type=gamma,
        metavar="N",
        help="draft tokens a round, or auto; the server's choice by default",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every request generates --max-tokens; the default",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--warm-up",
        type=int,
        metavar="N",
        help="requests that do not count; as many as clients by default",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that a request may take; 600 by default",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="the key is its first line")
    add("--json", type=Path, metavar="FILE", help="write all figures, and those of each request")
    add("--html", type=Path, metavar="FILE", help="write a page with plots")


def read_key(file: Path | None) -> str | None:
    """Return the first line that is neither empty nor a comment. Raises BadValue if none is."""
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(
            f"--api-key-file {file} cannot be read: {error}", param="api_key_file"
        ) from error
    for line in lines:
        if key := line.partition("#")[0].strip():
            return key
    raise BadValue(
        f"--api-key-file {file} has no key in it; write the key on its first line",
        param="api_key_file",
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _can_write(file: Path) -> bool:
    """Return whether the file can be written, checked before the load so that it is not lost."""
    if file.is_dir():
        return False
    return os.access(file if file.exists() else file.absolute().parent, os.W_OK)
