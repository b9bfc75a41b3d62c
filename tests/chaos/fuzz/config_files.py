"""Damaged config files and overrides, which may only be refused by a ConfigError."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import yaml

from specserve.config.tree import config_from_file, parse_override
from specserve.errors import ConfigError
from tests.chaos.fuzz.mutations import (
    cut,
    flip_bits,
    json_value,
    mutate_tree,
    repeat,
    replace_bytes,
    truncate,
)
from tests.chaos.fuzz.outcome import FuzzOutcome, measure

MAX_BYTES = 3000  # the parser takes a second for 50 kB
GOOD: dict[str, object] = {
    "model": "demo",
    "name": "one",
    "target": {"dtype": "float32", "threads": 2, "device": "cpu", "label_selector": {"a": "b"}},
    "draft": {"kind": "neural", "placement": "auto", "stages": [{"kind": "bigram"}]},
    "speculation": {"gamma": 4, "max_gamma": 16, "anticipation": {"enabled": True, "fanout": 2}},
    "cache": {"pages": 64, "prefix_caching": True, "memory_fraction": 0.5},
    "limits": {"max_running": 8, "max_queued": 8, "request_timeout_s": 60.0},
    "replicas": {"min": 1, "max": 2},
    "http": {"host": "127.0.0.1", "port": 8000, "cors_origins": ["http://x"], "root_path": "/a"},
    "faults": {"round_deadline_s": 20},
}
WORDS = (
    *"auto none neural cascade vertical ../../x /dev/zero 0x7f 1e999 :: [::1] a.b.c".split(),
    {"kind": "cascade", "stages": []},
)
MEMBERS = (*GOOD, "kind", "path", "gamma", "target.path", "http.port", "", "日本", "a..b", ".")
SNIPPETS = (
    *("!!int x", "!!bool x", "!!float x", "!!timestamp x", "!!binary x", "!!python/object:x.Y {}"),
    *("2026-13-45", "0o9", "1_000", "9" * 5000, "-.inf", ".nan", "~", "!!set {a, b}", "!!omap [a]"),
    *("*a", "&a [*a]", "? [a]\n: b", "<<: *a", "<<: 1", "%YAML 9.9\n---", "---\n...\n---", "\t"),
    *("[" * 500, "{a: " * 500, "- " * 500, "!<!> x", "| \n x", "'\x00'", "\ufeff", "2026-11-23"),
)


def fuzz_config_files(count: int, seed: int = 6) -> FuzzOutcome:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.yaml"

        def read_one() -> str:
            try:
                if rng.random() < 0.2:
                    parse_override(f"speculation.gamma={_override(rng)}")
                    return "read"
                file.write_bytes(_damaged_yaml(rng))
                config_from_file(file)
            except ConfigError:
                return "refused"
            return "read"

        return measure("config files", count, read_one)


def _damaged_yaml(rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(300))
    tree: object = GOOD
    for _ in range(rng.randrange(3)):
        tree = mutate_tree(rng, tree, lambda: json_value(rng, 2, words=WORDS, members=MEMBERS))
    text = yaml.safe_dump(tree, allow_unicode=True)
    if rng.random() < 0.3:
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        lines[at] = rng.choice((lines[at].partition(":")[0] + ": ", "", "- ")) + rng.choice(
            SNIPPETS
        )
        text = "\n".join(lines)
    data = text.encode(errors="surrogatepass")
    if rng.random() < 0.4:
        mutations = (
            flip_bits,
            cut,
            repeat,
            truncate,
            replace_bytes(b":-{}[]&*!|>'\"%@#\n \t\x00\xff"),
        )
        data = rng.choice(mutations)(rng, data)[:MAX_BYTES]
    return data


def _override(rng: random.Random) -> str:
    return rng.choice(SNIPPETS) if rng.random() < 0.5 else _damaged_yaml(rng).decode("latin-1")
