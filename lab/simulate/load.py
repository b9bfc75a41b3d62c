"""The simulated load: arrival times and lengths of requests, drawn from a seed or recorded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve.config.fields import choice, integer, number, setting, subsection, text
from specserve.errors import ConfigError

MAX_COUNT = 10**7


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of one request."""

    time: float  # seconds from the beginning; unused in a closed loop
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LengthsConfig:
    """Numbers of tokens of prompts or outputs.

    `fixed`: always `tokens`; `uniform`: from `low` to `high`; `lognormal`: with the median
    `tokens`, clipped to `low` and `high`.
    """

    kind: str = setting("fixed", choice("fixed", "uniform", "lognormal"))
    tokens: int = setting(256, integer(1, MAX_COUNT))
    low: int = setting(1, integer(1, MAX_COUNT))
    high: int = setting(4096, integer(1, MAX_COUNT))
    sigma: float = setting(1.0, number(0, 10))  # of the logarithm

    def draw(self, rng: random.Random) -> int:
        """Return a random number of tokens."""
        return _DRAWS[self.kind](self, rng)


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """A schedule of requests.

    `closed`: from `concurrency` clients that each send the next request once they have the answer;
    `poisson`: at `rate` per second; `recorded`: as in `file`.
    """

    kind: str = setting("closed", choice("closed", "poisson", "recorded"))
    concurrency: int = setting(1, integer(1, 10**6))
    rate: float = setting(1.0, number(0, 10**6, above=True))
    # JSON lines with time, prompt_tokens and output_tokens.
    file: str | None = setting(None, text())
    requests: int = setting(100, integer(1, MAX_COUNT))
    per_client: int = setting(1, integer(1, MAX_COUNT))  # requests at least, in a closed loop
    prompt: LengthsConfig = subsection(LengthsConfig)
    output: LengthsConfig = subsection(LengthsConfig)


def arrivals(load: LoadConfig, *, seed: int, directory: Path) -> tuple[Arrival, ...]:
    """Return the requests in order of time.

    A relative path of a recorded file starts from `directory`. Raises ConfigError.
    """
    if load.kind == "recorded":
        if load.file is None:
            raise ConfigError(
                "load.kind recorded needs load.file, "
                "JSON lines with time, prompt_tokens and output_tokens"
            )
        recorded = sorted(_recorded(directory / load.file), key=lambda arrival: arrival.time)
        return tuple(recorded[: load.requests])
    rng = random.Random(seed)
    time, drawn = 0.0, []
    for _ in range(
        max(load.requests, load.per_client * load.concurrency)
        if load.kind == "closed"
        else load.requests
    ):
        drawn.append(Arrival(time, load.prompt.draw(rng), load.output.draw(rng)))
        time += rng.expovariate(load.rate) if load.kind == "poisson" else 0.0
    return tuple(drawn)


def _recorded(file: Path) -> Iterator[Arrival]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"load.file cannot be read: {error}") from error
    for line_number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                entry = json.loads(line)
                arrival = Arrival(
                    float(entry["time"]), int(entry["prompt_tokens"]), int(entry["output_tokens"])
                )
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"load.file, line {line_number}, needs time, prompt_tokens and output_tokens: "
                    f"{line[:80]!r}"
                ) from error
            if not (
                math.isfinite(arrival.time)
                and arrival.time >= 0
                and arrival.prompt_tokens > 0
                and arrival.output_tokens > 0
            ):
                raise ConfigError(
                    f"load.file, line {line_number}, has a time or a length that cannot be: "
                    f"{line[:80]!r}"
                )
            yield arrival


def _lognormal(lengths: LengthsConfig, rng: random.Random) -> int:
    drawn = rng.lognormvariate(math.log(lengths.tokens), lengths.sigma)
    return round(min(max(drawn, lengths.low), lengths.high))


_DRAWS: dict[str, Callable[[LengthsConfig, random.Random], int]] = {
    "fixed": lambda lengths, rng: lengths.tokens,
    "uniform": lambda lengths, rng: rng.randint(lengths.low, lengths.high),
    "lognormal": _lognormal,
}
