"""`draft.kind` on a whole engine: each kind writes the target's text; mistakes are found early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve import LLM, Sampling
from specserve.cli.main import main
from specserve.config.kinds import NGRAM_KINDS
from specserve.config.sections import DRAFT_KINDS
from specserve.config.tree import DEMO
from specserve.drafters.registry import APART, OPENERS, TOGETHER
from specserve.errors import ConfigError, ModelError

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"


def test_every_kind_of_the_config_has_an_opener() -> None:
    assert {*OPENERS, *APART, *TOGETHER} == set(DRAFT_KINDS) - {"none"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    (root / "corpus.txt").write_text((PROMPT + " a - b\n") * 20)
    assert (
        main(
            [
                "tables",
                "--tokenizer",
                str(DEMO / "target"),
                "--text",
                str(root / "corpus.txt"),
                "--out",
                str(root / "tables.safetensors"),
            ]
        )
        == 0
    )
    return root


def generate(**keys: Any) -> tuple[tuple[int, ...], int]:
    """Return the greedy and then the seeded tokens, and how many draft tokens were accepted."""
    own: dict[str, Any] = {
        "target.dtype": "bfloat16",
        "target.threads": 1,
        "draft.threads": 1,
        "cache.pages": 256,
        "speculation.gamma": 4,
    }
    with LLM(**own | keys) as llm:
        outputs = llm.generate(
            [PROMPT, PROMPT],
            [Sampling(max_tokens=48, temperature=0), Sampling(max_tokens=48, seed=3)],
        )
    return tuple(token for output in outputs for token in output.token_ids), sum(
        output.stats.accepted for output in outputs if output.stats
    )


@pytest.fixture(scope="module")
def plain() -> tuple[int, ...]:
    return generate(**{"draft.kind": "none", "draft.path": None})[0]


@pytest.mark.parametrize("kind", NGRAM_KINDS)
def test_every_kind_writes_what_plain_decoding_writes(plain: tuple[int, ...], kind: str) -> None:
    tokens, _ = generate(**{"draft.kind": kind})
    assert tokens == plain


@pytest.mark.parametrize("kind", ["bigram", "max_gram"])
def test_tables_are_read_from_their_directory_and_help(
    plain: tuple[int, ...], tables: Path, kind: str
) -> None:
    tokens, accepted = generate(**{"draft.kind": kind, "draft.path": str(tables)})
    assert tokens == plain
    assert accepted > 0


def test_missing_or_unused_tables_are_reported_at_once(tables: Path) -> None:
    with pytest.raises(ModelError):
        generate(**{"draft.kind": "bigram", "draft.path": str(tables / "nowhere")})
    with pytest.raises(ConfigError, match=r"draft\.learn"):
        generate(**{"draft.kind": "bigram", "draft.learn": False})
    with pytest.raises(ConfigError, match="nothing to count"):
        generate(**{"draft.kind": "random", "draft.path": str(tables)})
