"""GBNF derives what llama.cpp's matcher would, character by character, and errors have a place."""

from __future__ import annotations

import re

import pytest

from specserve.errors import BadValue
from specserve.grammar.gbnf import is_gbnf, lark_from_gbnf
from tests.support.grammar_texts import FORBIDDEN, PREFIX, WHOLE, how_far

JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# as in llama.cpp's own file
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "text", "outcome"),
    [
        (JSON, '{"a": [1, -2.5e3, "x\\u00e9é/", null]}', WHOLE),
        (JSON, '{"a" 1', FORBIDDEN),
        (JSON, '{"a":"\n', FORBIDDEN),
        # A lexeme that took all it could would take the last a.
        ('root ::= [a-z]+ "a"', "aba", WHOLE),
        ('root ::= [a-z]+ "a"', "ab", PREFIX),
        # Both alternatives go on after ab, the longer literal or not.
        ('root ::= x | y\nx ::= "ab" "x"\ny ::= [a] "by"', "abx", WHOLE),
        ('root ::= x | y\nx ::= "ab" "x"\ny ::= [a] "by"', "aby", WHOLE),
        ("root ::= [a-] [^x/] .", "-q\n", WHOLE),
        ("root ::= [a-] [^x/] .", "a/", FORBIDDEN),
        ('root ::= "x"{2,3} "é\\x41\\u00e9\\U0001F600"', "xxéAé😀", WHOLE),
        ('root ::= "x"{2,} | "y"{2}', "xxxx", WHOLE),
        ('root ::= "x"{2,} | "y"{2}', "yyy", FORBIDDEN),
        ('root ::=\n  "a"\n  | a-b  # a rule\na-b ::= "b" root?', "bba", WHOLE),
        (r'root ::= "\"" [\]\\^]+ "/"', '"]\\^/', WHOLE),
        ('root ::= ""', "", WHOLE),
    ],
)
def test_a_text_is_derived_as_by_llama_cpp(grammar: str, text: str, outcome: str) -> None:
    assert how_far({"grammar": grammar}, text) == outcome


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= x", "no rule x"),
        ('rot ::= "a"', "no rule root"),
        ('root ::= "a"\nx := "b"', "line 2, column 3: ::= is missing"),
        ('root ::= "a', 'line 1, column 12: " is missing'),
        ("root ::= [a", "] is missing"),
        ('root ::= ("a"', ") is missing"),
        ('root ::= "a" )', "')' is not expected"),
        ('root ::= "\\q"', "no escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a"\nroot ::= "b"', "there twice"),
        ("root ::= []", "matches nothing"),
        ("root ::= " + "(" * 100, "nested more than"),
        ("root ::= [z-a]", "wrong"),
        ('root ::= "' + "a" * 60_000 + '"', "too long"),
        ("root ::= root", "no text can follow it"),
        ('root ::= "a" <think>', "'<' is not expected"),
    ],
)
def test_an_error_is_refused_with_its_place(grammar: str, words: str) -> None:
    with pytest.raises(BadValue, match=re.escape(words)) as error:
        how_far({"grammar": grammar}, "")
    assert error.value.param in ("guided", "grammar")


def test_a_grammar_of_lark_is_no_gbnf() -> None:
    assert not is_gbnf('start: x\nx: "a ::= b"')
    assert is_gbnf(JSON)
    assert lark_from_gbnf(JSON).startswith("start: ")
