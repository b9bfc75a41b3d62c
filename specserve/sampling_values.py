"""Values of single sampling parameters, parsed within their bounds; others raise BadValue.

It knows neither `Sampling`, which puts them together, nor grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from reprlib import repr as shortened
from typing import Any

from specserve.config.fields import FieldRule, integer, number
from specserve.errors import BadValue
from specserve.types import Speculation

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 64

_TOKEN_ID = integer(0, 2**31)
_BIAS = number(-100, 100)
_GAMMA = integer(0)


def parse_value(param: str, rule: FieldRule, value: object) -> Any:
    """Return the value as the rule parses it, or raise BadValue with parameter and range."""
    try:
        return rule.read(value, param)
    except ValueError:
        raise BadValue(
            f"{param} must be {rule.expects}, not {shortened(value)}", param=param
        ) from None


def parse_stops(value: object) -> tuple[str, ...]:
    """Return the stop strings of a text, a list of texts, or None."""
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
            "stop must be a text or a list of texts, "
            f"each of 1 to {MAX_STOP_LENGTH} characters, not {shortened(value)}",
            param="stop",
        )
    for stop in stops:
        _check_unicode("stop", stop)
    return stops


def _check_unicode(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadValue(
            f"{param} is not Unicode text: it holds half of a surrogate pair", param=param
        ) from error


def parse_stop_ids(value: object) -> tuple[int, ...]:
    """Return the token ids that end a text; None means none of them."""
    return () if value is None else _ids("stop_token_ids", value, MAX_STOP_IDS)


def parse_allowed_ids(value: object) -> tuple[int, ...] | None:
    """Return the only token ids that may be written; None allows all."""
    if value is None:
        return None
    ids = _ids("allowed_token_ids", value, MAX_ALLOWED_IDS)
    if not ids:
        raise BadValue(
            "allowed_token_ids must have at least one token id", param="allowed_token_ids"
        )
    return ids


def _ids(param: str, value: object, most: int) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise BadValue(f"{param} must be a list of token ids, not {shortened(value)}", param=param)
    ids = tuple(parse_value(param, _TOKEN_ID, token) for token in value)
    if len(ids) > most:
        raise BadValue(f"{param} has {len(ids)} ids; {most} is the most", param=param)
    return ids


def parse_bad_words(value: object) -> tuple[str, ...]:
    """Return the texts that must not be written; None means none of them."""
    if value is None:
        return ()
    words = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if len(words) > MAX_BAD_WORDS:
        raise BadValue(
            f"bad_words has {len(words)} texts; {MAX_BAD_WORDS} is the most", param="bad_words"
        )
    if isinstance(value, str) or not all(map(_is_bad_word, words)):
        raise BadValue(
            f"bad_words must be a list of texts, each of 1 to {MAX_BAD_WORD_LENGTH} characters "
            f"and not only of spaces, not {shortened(value)}",
            param="bad_words",
        )
    return words


def _is_bad_word(word: object) -> bool:
    return isinstance(word, str) and len(word) <= MAX_BAD_WORD_LENGTH and bool(word.strip())


def parse_biases(value: object) -> dict[int, float]:
    """Return what is added to the logits of token ids, which may be text, as in JSON."""
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
        parse_value("logit_bias", _TOKEN_ID, _from_json(token)): parse_value(
            "logit_bias", _BIAS, bias
        )
        for token, bias in value.items()
    }


def _from_json(token: object) -> object:
    return (
        int(token)
        if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 20
        else token
    )


def parse_speculation(value: object) -> Speculation:
    """Return gamma and verifier; None, and `auto` for either, leave the choice to the engine."""
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
        gamma=None if gamma is None else parse_value("speculation.gamma", _GAMMA, gamma),
        verifier=verifier,
    )
