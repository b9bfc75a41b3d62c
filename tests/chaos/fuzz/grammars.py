"""Damaged grammars: schemas, regular expressions, Lark and GBNF, under the check and masks."""

from __future__ import annotations

import json
import random
from functools import cache

from llguidance import LLTokenizer

from specserve.errors import BadValue
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.request import parse_guided
from specserve.grammar.validate import validate_grammar
from specserve.types import Grammar
from tests.chaos.fuzz.mutations import json_value, mutate_tree
from tests.chaos.fuzz.outcome import FuzzOutcome, measure

NUM_MASKS = 4
MAX_TEXT = 70_000  # characters, a little more than the check lets through
END = 256  # of the byte tokenizer

POINT = {"x": {"type": "number"}, "y": {"type": "integer", "minimum": -5, "multipleOf": 5}}
SCHEMAS: tuple[object, ...] = (
    {"type": "object", "properties": POINT, "required": ["x"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["a", 1, None, "日本"]}, "minItems": 1, "maxItems": 9},
    {"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]+)?$", "maxLength": 20},
    {"anyOf": [{"type": "string", "format": "date-time"}, {"const": {"k": [1.5, True]}}]},
    {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {"type": "object", "patternProperties": {"^x-": {"type": "boolean"}}, "minProperties": 1},
    {"allOf": [{"type": "object", "properties": POINT}, {"required": ["y"]}]},
)
REGEXES = (
    r"[a-z]+@[a-z]+\.(com|org)",
    r"(\d{3}-){2}\d{4}",
    r"(?i)yes|no|maybe",
    r"\p{Lu}\p{Ll}*( \p{Lu}\p{Ll}*){0,3}",
    r"(a|b)*a(a|b){8}",
    "[ぁ-ん]{1,20}。",
)
LARKS = (
    'start: "a" start "b" | ""',
    'start: item ("," item)*\nitem: NAME "=" NUMBER\nNAME: /[a-z]+/\nNUMBER: /[0-9]{1,9}/',
    'start: expr\nexpr: term (("+" | "-") term)*\nterm: "(" expr ")" | /[0-9]+/',
    '%llguidance {}\nstart: "call" %json {"type": "object"}\n',
    'start: A B? C~2..4\nA: "a"i\nB: A "b"\nC: /c+/ & ~/ccc/',
    "%import common.INT\n%ignore /[ ]+/\nstart: INT+ // end",
)
GBNFS = (
    'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]{1,9} # pairs',
    'root ::= "a" root "b" | ""\nx ::= [^\\x00-\\x1F"] .',
)
PIECES = {
    "regex": r"( ) [ ] { } {2,} {1000} {4000000000} * + ? | \ \p{L} \u{d800} \x \b (?= (?i) [^ -] ."
    r" ^ $ \w & ~ 日 \0",
    "lark": '( ) [ ] " / : | ~ ~1000 ~1..99999 * + ? -> ! %import %json{} %regex <[1-5]> \\ \n'
    ' start a0 start:"x" ::= root A: & // @ % {} $ 日 "\\u{d800}" (?P<',
}
KEYWORDS = (
    *"type properties items required enum const anyOf allOf oneOf not $ref $defs pattern".split(),
    *"minimum maximum multipleOf minLength maxLength minItems maxItems format if then".split(),
    *"additionalProperties patternProperties prefixItems x-guidance exclusiveMinimum".split(),
)
SCHEMA_WORDS: tuple[object, ...] = (
    *"object array string number integer boolean null #/$defs/n #/properties/x # ^a{9} (".split(),
    {"$ref": "#"},
    {"type": "object"},
    {"type": "string"},
    1e-300,
)


def fuzz_grammars(count: int, seed: int = 4) -> FuzzOutcome:
    """Check damaged grammars, and compute the masks of a random text under those that pass.

    Each is refused, or accepted; a text may end early, but for a reason that its matcher states.
    """
    rng = random.Random(seed)

    def check_one() -> str:
        try:
            grammar = damaged_grammar(rng)
            validate_grammar(grammar)
        except BadValue:
            return "refused"
        return _follow(grammar, rng)

    return measure("grammars", count, check_one)


def damaged_grammar(rng: random.Random) -> Grammar:
    """Return a grammar as a client's `guided` becomes one, which may raise BadValue."""
    kind = rng.choice(("json_schema", "regex", "lark"))
    if kind == "json_schema":
        return Grammar(kind, _damaged_schema(rng))
    text = rng.choice(REGEXES if kind == "regex" else LARKS + GBNFS)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        text = _damaged_text(rng, text, PIECES[kind].split(" "))
    guide = "grammar" if kind == "lark" else kind
    grammar = parse_guided({guide: text})
    assert grammar is not None
    return grammar


def _follow(grammar: Grammar, rng: random.Random) -> str:
    """Return how a text of random tokens under a grammar went."""
    matcher = _compiler().start(grammar)
    for number in range(NUM_MASKS):
        allowed = [
            32 * word + bit
            for word, bits in enumerate(matcher.bits().tolist())
            for bit in range(32)
            if bits >> bit & 1
        ]
        if matcher.error is not None:
            return "accepted, given up later"
        if not allowed or (token := rng.choice(allowed)) == END:
            break
        matcher.write(number, [token])
    return "accepted"


@cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: LLTokenizer("byte"), end_ids=frozenset({END}))


def _damaged_schema(rng: random.Random) -> str:
    schema = rng.choice(SCHEMAS)
    for _ in range(rng.choice((1, 1, 2, 4))):
        schema = mutate_tree(
            rng, schema, lambda: json_value(rng, 2, words=SCHEMA_WORDS, members=KEYWORDS)
        )
    text = json.dumps(schema)
    if rng.random() < 0.05:
        opening, closing = rng.choice((('{"items":', "}"), ('{"allOf":[', "]}"), ('{"not":', "}")))
        depth = rng.choice((50, 500, 4000))
        text = opening * depth + text + closing * depth
    if rng.random() < 0.2:
        pieces = ['"', "{", "}", "\\ud800", "\ud800", "1e999", "\x00"]
        text = _damaged_text(rng, text, pieces)
    return text


def _damaged_text(rng: random.Random, text: str, pieces: list[str]) -> str:
    first, second = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    part = text[first:second]
    chosen = rng.randrange(6)
    if chosen == 0:
        return text[:first] + text[second:]
    if chosen == 1:
        times = rng.choice((1, 2, 50, MAX_TEXT // (len(part) + 1)))
        return (text[:second] + part * times + text[second:])[:MAX_TEXT]
    if chosen == 2:
        return (
            text[:first] + chr(rng.choice((0, 10, 34, 92, 0x301, 0xD800, 0x1F600))) + text[second:]
        )
    if chosen == 3:
        depth = rng.choice((1, 20, 400, 10_000))
        return text[:first] + "(" * depth + part + ")" * depth + text[second:]
    return text[:first] + rng.choice(pieces) + text[first if chosen == 4 else second :]
