"""The sampling parameters of a request, by their HTTP names: checked once, made into requests.

The values of single parameters are parsed by `sampling_values`. It knows no HTTP and no models.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

from specserve.config.fields import boolean, integer, number, setting, text
from specserve.errors import BadValue
from specserve.grammar.request import parse_guided, parse_response_format
from specserve.grammar.validate import validate_grammar
from specserve.sampling_values import (
    parse_allowed_ids,
    parse_bad_words,
    parse_biases,
    parse_speculation,
    parse_stop_ids,
    parse_stops,
    parse_value,
)
from specserve.types import Adapter, Grammar, Request, Speculation, TokenRule, Warp

MAX_N = 128
MAX_PRIORITY = 2**31 - 1
MAX_LOGPROBS = 20
MAX_COUNT = 2**31
"""Most tokens of a count: more than any model has, and within what the wire format can carry."""

_BITS = 2**64 - 1
_NUM_LOGPROBS = integer(0, MAX_LOGPROBS)


def random_seed() -> int:
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that continue one prompt.

    Temperature 0 is greedy; top_k 0 or -1 is off; a seed makes the text repeatable. The constructor
    raises BadValue, which names the parameter, for values out of range.
    """

    max_tokens: int = setting(16, integer(0, MAX_COUNT))
    temperature: float = setting(1.0, number(0, 100))
    top_p: float = setting(1.0, number(0, 1, above=True))
    top_k: int = setting(0, integer(-1, MAX_COUNT))  # 0 is off, and -1 becomes 0
    min_p: float = setting(0.0, number(0, 1))
    n: int = setting(1, integer(1, MAX_N))
    stop: str | Sequence[str] | None = ()  # a tuple once checked
    stop_token_ids: Sequence[int] | None = ()  # a tuple once checked
    ignore_eos: bool = setting(False, boolean())
    # new tokens before which no end token, no stop token and no stop string ends the text
    min_tokens: int = setting(0, integer(0, MAX_COUNT))
    bad_words: Sequence[str] | None = ()  # a tuple once checked
    allowed_token_ids: Sequence[int] | None = None  # a tuple once checked; None allows all
    priority: int = setting(0, integer(-MAX_PRIORITY, MAX_PRIORITY))  # a lower one runs first
    seed: int | None = setting(None, integer(-(2**63), _BITS))
    # a number asks for that many alternatives; True goes with top_logprobs
    logprobs: bool | int | None = None
    top_logprobs: int | None = setting(None, _NUM_LOGPROBS)
    # alternatives beside each token of the prompt, as vLLM has it
    prompt_logprobs: int | None = setting(None, _NUM_LOGPROBS)
    echo: bool = setting(False, boolean())
    presence_penalty: float = setting(0.0, number(-2, 2))
    frequency_penalty: float = setting(0.0, number(-2, 2))
    repetition_penalty: float = setting(1.0, number(0.01, 100))
    # ids may be text, as in JSON; a dict once checked
    logit_bias: Mapping[int, float] | None = None
    speculation: Speculation | Mapping[str, object] | None = None  # a Speculation once checked
    response_format: Mapping[str, object] | None = None  # OpenAI's structured output
    # one of `regex`, `grammar` (Lark or GBNF), `json` (a schema), `choice` and `structural_tag`
    guided: Mapping[str, object] | None = None
    # pages are shared only with prompts of the same salt
    cache_salt: str | None = setting(None, text())
    adapter: str | None = setting(None, text())  # of the target, by its name in adapters.paths
    # the text ends with the stop string, or the text of the token, that ended it
    include_stop_str_in_output: bool = setting(False, boolean())
    skip_special_tokens: bool = setting(True, boolean())  # False: they appear by their names

    def __post_init__(self) -> None:
        """Replace what was given by plain ints, floats and tuples, or raise BadValue."""
        keep = object.__setattr__
        for field in fields(self):
            value, rule = getattr(self, field.name), field.metadata.get("rule")
            if rule is not None and (value is not None or field.default is not None):
                keep(self, field.name, parse_value(field.name, rule, value))
        keep(self, "stop", parse_stops(self.stop))
        keep(self, "stop_token_ids", parse_stop_ids(self.stop_token_ids))
        keep(self, "logit_bias", parse_biases(self.logit_bias))
        keep(self, "top_k", max(self.top_k, 0))
        keep(self, "bad_words", parse_bad_words(self.bad_words))
        keep(self, "allowed_token_ids", parse_allowed_ids(self.allowed_token_ids))
        self._check_min_tokens()
        keep(self, "speculation", parse_speculation(self.speculation))
        self._check_logprobs()
        self._check_max_tokens()
        self._check_grammar_conflicts()

    @property
    def grammar(self) -> Grammar | None:
        """Grammar of the whole text; None allows any text."""
        return parse_response_format(self.response_format) or parse_guided(self.guided)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives reported beside each token; None: no logprobs at all."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return self.top_logprobs or 0 if self.logprobs is True else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to compute beside each token of the prompt; None: no logprobs.

        An echoed prompt has as many as the text.
        """
        counts = (self.prompt_logprobs, self.num_logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)

    def requests(
        self,
        prompt: Sequence[int],
        random_seed: Callable[[], int] = random_seed,
        *,
        tenant: str = "",
        adapter: Adapter | None = None,
    ) -> list[Request]:
        """Return `n` requests. The first has the seed itself, the others seeds derived from it.

        Requests of different tenants share no pages.
        """
        seed = (self.seed if self.seed is not None else random_seed()) & _BITS
        first = replace(self._request(tuple(prompt), seed, tenant), adapter=adapter)
        return [first, *(replace(first, seed=_derive_seed(seed, i)) for i in range(1, self.n))]

    def check_ids(self, vocab_size: int) -> None:
        """Raise BadValue for ids of a parameter that the vocabulary does not have."""
        for param in ("logit_bias", "allowed_token_ids"):
            for token in getattr(self, param) or ():
                if token >= vocab_size:
                    raise BadValue(
                        f"{param} has token id {token}, but the vocabulary ends at "
                        f"{vocab_size - 1}",
                        param=param,
                    )

    def check_grammar(self) -> None:
        """Raise BadValue for a grammar that no text can follow.

        A large grammar takes tenths of a second.
        """
        if (grammar := self.grammar) is None:
            return
        param = "guided" if self.guided is not None else "response_format"
        try:
            validate_grammar(grammar)
        except BadValue as error:
            raise BadValue(f"{param}: {error}", param=param) from error

    def check_encoder_input(self) -> None:
        """Raise BadValue for parameters that an encoder-decoder cannot honour."""
        if self.echo:
            raise BadValue(
                "echo is not for encoder-decoders, whose text does not continue the prompt",
                param="echo",
            )
        if self.prompt_logprobs is not None:
            raise BadValue(
                "prompt_logprobs is not for encoder-decoders, which do not predict their prompt",
                param="prompt_logprobs",
            )

    def _request(self, prompt: tuple[int, ...], seed: int, tenant: str) -> Request:
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
            prompt_logprobs=self.num_prompt_logprobs,
            speculation=self.speculation,
            grammar=self.grammar,
            cache_salt=_page_salt(tenant, self.cache_salt),
            priority=self.priority,
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
            rule=self._token_rule(),
        )

    def _token_rule(self) -> TokenRule | None:
        """Return the rule without bad words and the model's end tokens, which are unknown here."""
        if not self.min_tokens and self.allowed_token_ids is None:
            return None
        return TokenRule(
            self.min_tokens,
            tuple(self.stop_token_ids or ()) if self.min_tokens else (),
            allowed_ids=tuple(self.allowed_token_ids or ()),
        )

    def _check_min_tokens(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise BadValue(
                f"min_tokens must be at most max_tokens, which is {self.max_tokens}, "
                f"not {self.min_tokens}",
                param="min_tokens",
            )

    def _check_logprobs(self) -> None:
        if self.logprobs is not None and not isinstance(self.logprobs, bool):
            object.__setattr__(
                self, "logprobs", parse_value("logprobs", _NUM_LOGPROBS, self.logprobs)
            )
        if self.top_logprobs is not None and self.logprobs is not True:
            raise BadValue("top_logprobs goes with logprobs true", param="top_logprobs")

    def _check_max_tokens(self) -> None:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise BadValue(
                "max_tokens must be 1 or more, or 0 with echo or prompt_logprobs, "
                "which then are all of the answer",
                param="max_tokens",
            )

    def _check_grammar_conflicts(self) -> None:
        """Raise BadValue for two grammars, and for a text that goes on where its grammar ends."""
        given = [name for name in ("response_format", "guided") if getattr(self, name) is not None]
        if self.grammar is None:
            return
        if len(given) == 2 and parse_response_format(self.response_format) is not None:
            raise BadValue(
                "response_format and guided both say what the text must be; give one of them",
                param="guided",
            )
        for name in ("ignore_eos", "echo"):
            if getattr(self, name):
                raise BadValue(
                    f"{name} and {given[-1]} exclude one another: "
                    "a text that must be something ends when it is that",
                    param=name,
                )


def _page_salt(tenant: str, cache_salt: str | None) -> bytes:
    """Return the salt of a sequence's pages; without any, they are shared by all that have none."""
    if not tenant and cache_salt is None:
        return b""
    parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, cache_salt or "")]
    lengths = b"%d %d " % (len(parts[0]), len(parts[1]))
    return blake2b(lengths + b"".join(parts), digest_size=16).digest()


def _derive_seed(seed: int, i: int) -> int:
    """Return SplitMix64's output for the i-th step from `seed`; the 0th is the seed itself.

    The seeds are well spread, and distinct for distinct i.
    """
    if i == 0:
        return seed
    z = (seed + i * 0x9E3779B97F4A7C15) & _BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
    return z ^ (z >> 31)
