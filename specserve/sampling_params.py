"""What a caller may ask for: the HTTP parameters by their names, checked once, here, and turned into the engine's requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from reprlib import repr as shortened
from typing import Any

from specserve.errors import BadValue
from specserve.grammar.request import read_guided, read_response_format
from specserve.grammar.validate import check
from specserve.types import Grammar, Request, Speculation, Warp

MAX_N, MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS, MAX_BIASES, MAX_LOGPROBS = (
    128,
    16,
    1024,
    1024,
    1024,
    20,
)
MAX_COUNT = (
    2**31
)  # of tokens: more than any model knows or writes, and within what messages between processes can carry
_BITS = 2**64 - 1


def fresh_seed() -> int:
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one prompt is continued. Temperature 0 is greedy; top_k 0 is off; a seed makes the text repeatable."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    stop: str | Sequence[str] | None = ()  # a tuple once checked
    stop_token_ids: Sequence[int] | None = ()  # likewise
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool | int | None = (
        None  # a number asks for that many alternatives; True goes with top_logprobs
    )
    top_logprobs: int | None = None
    echo: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = (
        None  # ids may be text, as in JSON; a dict once checked
    )
    speculation: Speculation | Mapping[str, object] | None = None  # a Speculation once checked
    response_format: Mapping[str, object] | None = None  # what the text must be, as OpenAI says it
    guided: Mapping[str, object] | None = (
        None  # or by `regex`, `grammar` (Lark), `json` (a schema) or `choice`
    )

    def __post_init__(self) -> None:
        """Raises BadValue naming the parameter. What is stored is plain ints, floats and tuples, whatever was given."""
        keep = object.__setattr__
        keep(self, "max_tokens", _whole("max_tokens", self.max_tokens, 1, MAX_COUNT))
        keep(self, "temperature", _number("temperature", self.temperature, 0, 100))
        keep(self, "top_p", _number("top_p", self.top_p, 0, 1, above=True))
        keep(self, "top_k", _whole("top_k", self.top_k, 0, MAX_COUNT))
        keep(self, "min_p", _number("min_p", self.min_p, 0, 1))
        keep(self, "n", _whole("n", self.n, 1, MAX_N))
        keep(self, "stop", _stops(self.stop))
        keep(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        keep(self, "ignore_eos", _flag("ignore_eos", self.ignore_eos))
        keep(
            self, "seed", None if self.seed is None else _whole("seed", self.seed, -(2**63), _BITS)
        )
        keep(self, "echo", _flag("echo", self.echo))
        keep(self, "presence_penalty", _number("presence_penalty", self.presence_penalty, -2, 2))
        keep(self, "frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2, 2))
        keep(
            self,
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, 0.01, 100),
        )
        keep(self, "logit_bias", _biases(self.logit_bias))
        keep(self, "speculation", _speculation(self.speculation))
        self._check_logprobs()
        self._check_structure()

    @property
    def grammar(self) -> Grammar | None:
        """What the whole text must be; None: anything."""
        return read_response_format(self.response_format) or read_guided(self.guided)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted beside each token; None: no logprobs at all."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return self.top_logprobs or 0 if self.logprobs is True else self.logprobs

    def requests(
        self, prompt: Sequence[int], fresh_seed: Callable[[], int] = fresh_seed
    ) -> list[Request]:
        """One for each of the `n`. The first has the seed itself, the others seeds that follow from it."""
        seed, grammar = (self.seed if self.seed is not None else fresh_seed()) & _BITS, self.grammar
        return [self._request(tuple(prompt), _mixed(seed, i), grammar) for i in range(self.n)]

    def check_ids(self, vocab_size: int) -> None:
        """Raises BadValue for a bias on an id that the vocabulary does not have."""
        for token in self.logit_bias or ():
            if token >= vocab_size:
                raise BadValue(
                    f"logit_bias has token id {token}, but the vocabulary ends at {vocab_size - 1}",
                    param="logit_bias",
                )

    def check_grammar(self) -> None:
        """Raises BadValue for a grammar that cannot be obeyed. Of a large one it takes tenths of a second."""
        if (grammar := self.grammar) is None:
            return
        param = "guided" if self.guided is not None else "response_format"
        try:
            check(grammar)
        except BadValue as error:
            raise BadValue(f"{param}: {error}", param=param) from error

    def check_source(self) -> None:
        """Raises BadValue for what makes no sense where a prompt is a source, as an encoder-decoder reads it."""
        if self.echo:
            raise BadValue(
                "echo is not for encoder-decoders, whose text does not continue the prompt",
                param="echo",
            )

    def _request(self, prompt: tuple[int, ...], seed: int, grammar: Grammar | None) -> Request:
        assert isinstance(self.speculation, Speculation)
        return Request(
            prompt=prompt,
            max_tokens=self.max_tokens,
            warp=self._warp(),
            seed=seed,
            seeded=self.seed is not None,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            speculation=self.speculation,
            grammar=grammar,
        )

    def _warp(self) -> Warp:
        return Warp(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
        )

    def _check_logprobs(self) -> None:
        if self.logprobs is not None and not isinstance(self.logprobs, bool):
            object.__setattr__(self, "logprobs", _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        if self.top_logprobs is not None:
            object.__setattr__(
                self, "top_logprobs", _whole("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
            )
            if self.logprobs is not True:
                raise BadValue("top_logprobs goes with logprobs true", param="top_logprobs")
        if self.echo and self.num_logprobs is not None:
            raise BadValue(
                "echo with logprobs is not supported: the prompt's own logprobs are not computed",
                param="echo",
            )

    def _check_structure(self) -> None:
        """What is under a grammar ends where the grammar says, and is nothing else besides."""
        given = [name for name in ("response_format", "guided") if getattr(self, name) is not None]
        if self.grammar is None:
            return
        if len(given) == 2 and read_response_format(self.response_format) is not None:
            raise BadValue(
                "response_format and guided both say what the text must be; give one of them",
                param="guided",
            )
        for name in ("ignore_eos", "echo"):
            if getattr(self, name):
                raise BadValue(
                    f"{name} and {given[-1]} exclude one another: a text that must be something ends when it is that",
                    param=name,
                )


def _mixed(seed: int, i: int) -> int:
    """SplitMix64's output for the i-th step from `seed`: well spread, and distinct for distinct i. The 0th is the seed itself."""
    if i == 0:
        return seed
    z = (seed + i * 0x9E3779B97F4A7C15) & _BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
    return z ^ (z >> 31)


def _whole(param: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    wanted = f"{low} or more" if high is None else f"from {low} to {high}"
    raise BadValue(f"{param} must be a whole number, {wanted}, not {shortened(value)}", param=param)


def _number(param: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    real: Any = value
    if (
        isinstance(value, Real)
        and not isinstance(value, bool)
        and low <= real <= high
        and not (above and real == low)
    ):  # NaN is in no range
        return float(real)
    wanted = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
    raise BadValue(f"{param} must be a number, {wanted}, not {shortened(value)}", param=param)


def _flag(param: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise BadValue(f"{param} must be true or false, not {shortened(value)}", param=param)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = (
        (value,)
        if isinstance(value, str)
        else tuple(value)
        if isinstance(value, (list, tuple))
        else (value,)
    )
    if len(stops) > MAX_STOPS:
        raise BadValue(f"stop has {len(stops)} texts; {MAX_STOPS} is the most", param="stop")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise BadValue(
            f"stop must be a text or a list of texts, each of 1 to {MAX_STOP_LENGTH} characters, not {shortened(value)}",
            param="stop",
        )
    return stops


def _stop_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise BadValue(
            f"stop_token_ids must be a list of token ids, not {shortened(value)}",
            param="stop_token_ids",
        )
    ids = tuple(_whole("stop_token_ids", token, 0, 2**31) for token in value)
    if len(ids) > MAX_STOP_IDS:
        raise BadValue(
            f"stop_token_ids has {len(ids)} ids; {MAX_STOP_IDS} is the most", param="stop_token_ids"
        )
    return ids


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadValue(
            f"logit_bias must map token ids to numbers, not {shortened(value)}", param="logit_bias"
        )
    if len(value) > MAX_BIASES:
        raise BadValue(
            f"logit_bias has {len(value)} ids; {MAX_BIASES} is the most", param="logit_bias"
        )
    return {
        _whole("logit_bias", _from_json(token), 0, 2**31): _number("logit_bias", bias, -100, 100)
        for token, bias in value.items()
    }


def _from_json(token: object) -> object:
    return (
        int(token)
        if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 20
        else token
    )


def _speculation(value: object) -> Speculation:
    if isinstance(value, Speculation):
        value = {"gamma": value.gamma, "verifier": value.verifier}
    if value is None:
        return Speculation()
    if not isinstance(value, Mapping):
        raise BadValue(
            f"speculation must hold gamma and verifier, not {shortened(value)}", param="speculation"
        )
    unknown = [str(key) for key in value if key not in ("gamma", "verifier")]
    if unknown:
        raise BadValue(
            f"speculation knows gamma and verifier, not {unknown[0]}",
            param=f"speculation.{unknown[0]}",
        )
    gamma, verifier = (
        None if value.get(key) == "auto" else value.get(key) for key in ("gamma", "verifier")
    )
    if verifier is not None and not isinstance(verifier, str):
        raise BadValue(
            f"speculation.verifier must be a name, not {shortened(verifier)}",
            param="speculation.verifier",
        )
    return Speculation(
        gamma=None if gamma is None else _whole("speculation.gamma", gamma, 0), verifier=verifier
    )
