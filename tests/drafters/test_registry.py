"""`draft.kind` on the whole engine: every kind writes the target's own text, with tables and without; mistakes are told early."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve import LLM, Sampling
from specserve.cli.main import main
from specserve.config.tree import DEMO, STATISTICAL
from specserve.errors import ConfigError, ModelError

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"


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


def written(**keys: object) -> tuple[tuple[int, ...], int]:
    """Greedy and seeded tokens, one behind the other; and how many drafts were accepted."""
    with LLM(
        **{
            "target.dtype": "bfloat16",
            "target.threads": 1,
            "draft.threads": 1,
            "cache.pages": 256,
            "speculation.gamma": 4,
        }
        | keys
    ) as llm:
        outputs = llm.generate(
            [PROMPT, PROMPT],
            [Sampling(max_tokens=48, temperature=0), Sampling(max_tokens=48, seed=3)],
        )
    return tuple(token for output in outputs for token in output.token_ids), sum(
        output.stats.accepted for output in outputs if output.stats
    )


@pytest.fixture(scope="module")
def plain() -> tuple[int, ...]:
    return written(**{"draft.kind": "none", "draft.path": None})[0]


@pytest.mark.parametrize("kind", STATISTICAL)
def test_every_kind_writes_what_plain_decoding_writes(plain: tuple[int, ...], kind: str) -> None:
    tokens, _ = written(**{"draft.kind": kind})
    assert tokens == plain


@pytest.mark.parametrize("kind", ["bigram", "max_gram"])
def test_tables_are_read_from_their_directory_and_help(
    plain: tuple[int, ...], tables: Path, kind: str
) -> None:
    tokens, accepted = written(**{"draft.kind": kind, "draft.path": str(tables)})
    assert tokens == plain
    assert accepted > 0


def test_tables_that_are_not_there_or_not_needed_are_told_at_once(tables: Path) -> None:
    with pytest.raises(ModelError):
        written(**{"draft.kind": "bigram", "draft.path": str(tables / "nowhere")})
    with pytest.raises(ConfigError, match=r"draft\.learn"):
        written(**{"draft.kind": "bigram", "draft.learn": False})
    with pytest.raises(ConfigError, match="nothing to count"):
        written(**{"draft.kind": "random", "draft.path": str(tables)})
