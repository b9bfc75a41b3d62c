"""Damaged files of API keys, which may only be refused by a ConfigError."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from specserve.api.keys import ApiKeys
from specserve.errors import ConfigError
from tests.chaos.fuzz.mutations import cut, flip_bits, repeat, replace_bytes, truncate
from tests.chaos.fuzz.outcome import FuzzOutcome, measure

GOOD = (
    b"# the keys of the team\n"
    b"ann key-of-ann requests_per_minute=60 tokens_per_minute=100000\n"
    b"bob key-of-bob concurrent_requests=4 expires=2027-01-31\n"
    b"\n"
    b"a-key-without-a-name\n"
    b"ann second-key-of-ann requests_per_minute=60 tokens_per_minute=100000 # both work\n"
)
MEANING = b"\n\r\t =#-_.09aA\x00\x85\xa0\xff\xc3"
MUTATIONS = (flip_bits, cut, repeat, truncate, replace_bytes(MEANING))


def fuzz_key_files(count: int, seed: int = 5) -> FuzzOutcome:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "keys"

        def read_one() -> str:
            file.write_bytes(damaged_key_file(rng))
            try:
                keys = ApiKeys.from_file(file)
            except ConfigError:
                return "refused"
            assert len(keys) > 0
            keys.find("key-of-ann")
            return "read"

        return measure("key files", count, read_one)


def damaged_key_file(rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(200))
    data = GOOD
    for _ in range(rng.randint(1, 3)):
        data = rng.choice(MUTATIONS)(rng, data)
    return data
