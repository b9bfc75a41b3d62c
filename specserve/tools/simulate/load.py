"""Who asks for what, and when: drawn from a seed, or as recorded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve.config.fields import choice, group, number, setting, text, whole
from specserve.errors import ConfigError

MOST = 10**7


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    time: float  # from the beginning; in a closed loop nobody looks at it
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens: always `tokens`, evenly from `low` to `high`, or lognormal with the median `tokens`, kept within those two."""

    kind: str = setting("fixed", choice("fixed", "uniform", "lognormal"))
    tokens: int = setting(256, whole(1, MOST))
    low: int = setting(1, whole(1, MOST))
    high: int = setting(4096, whole(1, MOST))
    sigma: float = setting(1.0, number(0, 10))  # of the logarithm

    def draw(self, dice: random.Random) -> int:
        return _DRAWS[self.kind](self, dice)


@dataclass(frozen=True, slots=True)
class Load:
    """`closed`: so many clients, each asking again when it is answered; `poisson`: so many requests a second; `recorded`: a file's."""

    kind: str = setting("closed", choice("closed", "poisson", "recorded"))
    concurrency: int = setting(1, whole(1, 10**6))
    rate: float = setting(1.0, number(0, 10**6, above=True))
    file: str | None = setting(
        None, text()
    )  # JSON lines with time, prompt_tokens and output_tokens
    requests: int = setting(100, whole(1, MOST))
    per_client: int = setting(1, whole(1, MOST))  # requests at least, in a closed loop
    prompt: Lengths = group(Lengths)
    output: Lengths = group(Lengths)


def arrivals(load: Load, *, seed: int, directory: Path) -> tuple[Arrival, ...]:
    """In order of time; a recorded file lies in `directory` unless its path says otherwise."""
    if load.kind == "recorded":
        if load.file is None:
            raise ConfigError(
                "load.kind recorded needs load.file, JSON lines with time, prompt_tokens and output_tokens"
            )
        return tuple(sorted(_recorded(directory / load.file), key=lambda arrival: arrival.time))[
            : load.requests
        ]
    dice = random.Random(seed)
    time, made = 0.0, []
    for _ in range(
        max(load.requests, load.per_client * load.concurrency)
        if load.kind == "closed"
        else load.requests
    ):
        made.append(Arrival(time, load.prompt.draw(dice), load.output.draw(dice)))
        time += dice.expovariate(load.rate) if load.kind == "poisson" else 0.0
    return tuple(made)


def _recorded(file: Path) -> Iterator[Arrival]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"load.file cannot be read: {error}") from error
    for number_, line in enumerate(lines, start=1):
        if line.strip():
            try:
                entry = json.loads(line)
                arrival = Arrival(
                    float(entry["time"]), int(entry["prompt_tokens"]), int(entry["output_tokens"])
                )
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"load.file, line {number_}, needs time, prompt_tokens and output_tokens: {line[:80]!r}"
                ) from error
            if not (
                math.isfinite(arrival.time)
                and arrival.time >= 0
                and arrival.prompt_tokens > 0
                and arrival.output_tokens > 0
            ):
                raise ConfigError(
                    f"load.file, line {number_}, has a time or a length that cannot be: {line[:80]!r}"
                )
            yield arrival


def _lognormal(lengths: Lengths, dice: random.Random) -> int:
    drawn = dice.lognormvariate(math.log(lengths.tokens), lengths.sigma)
    return round(min(max(drawn, lengths.low), lengths.high))


_DRAWS: dict[str, Callable[[Lengths, random.Random], int]] = {
    "fixed": lambda lengths, dice: lengths.tokens,
    "uniform": lambda lengths, dice: dice.randint(lengths.low, lengths.high),
    "lognormal": _lognormal,
}
