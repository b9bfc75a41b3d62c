"""Mangled checkpoints, each loaded as `specserve generate` would, in a process of its own.

That process may allocate no more than SPARE_BYTES beyond what it has after its imports, so that a
file's absurd numbers show as failed allocations.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from specserve.errors import SpecserveError
from specserve.llm.llm import LLM
from specserve.sampling_params import Sampling
from tests.chaos.fuzz.mutations import (
    cut,
    flip_bits,
    json_value,
    mutate_tree,
    repeat,
    truncate,
)
from tests.chaos.fuzz.outcome import PATIENCE_S, FuzzOutcome, measure
from tests.support.checkpoints import add_tokenizer, make

SPARE_BYTES = 3 * 2**30
SHARDED, WHOLE, OTHER = "sharded", "whole", "other"
OPTIONS: Mapping[str, object] = {
    "speculation.gamma": 2,  # so that no passes are timed
    "cache.pages": 16,
    "limits.max_context": 128,
    "target.threads": 1,
    "draft.threads": 1,
    "target.device": "cpu",
}
NUMBERS: tuple[object, ...] = (
    *(0, -1, 1, 3, 7, 2**16, 2**31, 2**40, 2**63, 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), None, True, "64", "x", [], [64], {}, "\ud800"),
)
Mangle = Callable[[random.Random, Path], None]


def fuzz_checkpoints(count: int, seed: int = 7) -> FuzzOutcome:
    """Load mangled checkpoints. Each is served, or refused by an error of specserve/errors.py."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        base = make_originals(Path(directory))
        loader = _Loader(base / WHOLE)

        def load_one() -> str:
            mangled = Path(directory) / "mangled"
            shutil.rmtree(mangled, ignore_errors=True)
            mangle(rng, base, mangled)
            return loader.load(mangled, as_draft=rng.random() < 0.2)

        try:
            outcome = measure("checkpoints", count, load_one, loader.memory)
        finally:
            loader.close()
    assert not {"crash", "hang"} & set(outcome.results)
    return outcome


def make_originals(directory: Path) -> Path:
    """Write the checkpoints that are mangled: in one file, in several, and of another kind."""
    for name, kind, shard_bytes in (
        (WHOLE, "llama", "1GB"),
        (SHARDED, "llama", 60_000),
        (OTHER, "qwen3_moe", "1GB"),
    ):
        add_tokenizer(make(kind, directory / name, shard_bytes=shard_bytes))
    return directory


def mangle(rng: random.Random, base: Path, out: Path) -> None:
    """Copy a checkpoint and damage one or two of its files."""
    chosen, original = rng.choice(MANGLES)
    shutil.copytree(base / (original or rng.choice((WHOLE, SHARDED, OTHER))), out)
    if rng.random() < 0.1:
        _mangle_config(rng, out)
    chosen(rng, out)


class _Loader:
    """The process that loads, which is started again when it has died."""

    def __init__(self, good: Path) -> None:
        self._good = good
        self._start()

    def load(self, mangled: Path, *, as_draft: bool) -> str:
        try:
            self._pipe.send((self._good, mangled) if as_draft else (mangled, None))
            if self._pipe.poll(PATIENCE_S):
                result: str = self._pipe.recv()
                return result
            self._process.kill()
            failure = "hang"
        except (EOFError, ConnectionError):
            failure = "crash"
        self._process.join()
        self._start()
        return failure

    def memory(self) -> int:
        """Return the resident bytes of the process."""
        rss: int = psutil.Process(self._process.pid).memory_info().rss
        return rss

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._good), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "served", "the checkpoint that is not mangled"


def _serve(pipe: Connection, good: Path) -> None:
    """Load a good checkpoint, and then, within the limit, what comes through the pipe."""
    warnings.simplefilter("ignore")
    pipe.send(load(good, good))
    limit = psutil.Process().memory_info().vms + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            target, draft = pipe.recv()
        except EOFError:
            return
        pipe.send(load(target, draft))


def load(target: Path, draft: Path | None) -> str:
    """Open a target, with or without a draft, write three tokens, and return how it went."""
    try:
        with LLM(target, draft, **OPTIONS) as llm:
            (output,) = llm.generate("ab", Sampling(max_tokens=3, temperature=0.0))
    except SpecserveError as error:
        message = str(error)
        assert message
        return "allocates too much" if "allocat" in message else "refused"
    return "served" if output.error is None else "failed as it wrote"


def _mangle_config(rng: random.Random, directory: Path) -> None:
    file = directory / "config.json"
    config: Any = json.loads(file.read_text())
    for _ in range(rng.choice((1, 1, 2))):
        if isinstance(config, dict) and rng.random() < 0.8:
            config[rng.choice(list(config))] = rng.choice(NUMBERS)
        else:
            config = mutate_tree(rng, config, lambda: json_value(rng, 2, words=NUMBERS))
    file.write_text(json.dumps(config))


def _mangle_other_json(rng: random.Random, directory: Path) -> None:
    files = sorted(file for file in directory.glob("*.json") if "index" not in file.name)
    file = rng.choice(files)
    tree: Any = json.loads(file.read_text())
    for _ in range(rng.choice((1, 2, 4))):
        tree = mutate_tree(rng, tree, lambda: json_value(rng, 2, words=NUMBERS))
    file.write_text(json.dumps(tree))


def _mangle_bytes(rng: random.Random, directory: Path) -> None:
    file = rng.choice(sorted(directory.iterdir()))
    data = rng.choice((flip_bits, cut, repeat, truncate))(rng, file.read_bytes()[:200_000])
    file.write_bytes(data)


def _remove_file(rng: random.Random, directory: Path) -> None:
    file = rng.choice(sorted(directory.iterdir()))
    file.unlink()
    if rng.random() < 0.3:
        file.mkdir()


def _mangle_index(rng: random.Random, directory: Path) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = index["weight_map"]
    places = ("../whole/model.safetensors", "/etc/passwd", "nowhere.safetensors", "", ".", "\0", 5)
    if rng.random() < 0.7:
        places = (*places, *names.values(), None, {}, "config.json", "x" * 5000)
        for _ in range(rng.randint(1, 3)):
            names[rng.choice(list(names))] = rng.choice(places)
        if rng.random() < 0.3:
            names["another.weight"] = rng.choice(places)
        tree: Any = index
    else:
        tree = mutate_tree(rng, index, lambda: json_value(rng, 2))
    file.write_text(json.dumps(tree))


def _mangle_header(rng: random.Random, directory: Path) -> None:
    """Damage the header of a safetensors file: its length, or shapes, dtypes, places and names."""
    file = rng.choice(sorted(directory.glob("*.safetensors")))
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, tensors = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.2:
        wrong = rng.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        file.write_bytes(struct.pack("<Q", wrong) + data[8:])
        return
    tree = json.loads(header)
    names = [name for name in tree if name != "__metadata__"]
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(names)
        entry = tree.get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
            continue
        chosen = rng.randrange(5)
        if chosen == 0:
            del tree[name]
        elif chosen == 1:
            tree[rng.choice(("other.weight", name + ".x", *names))] = tree.pop(name)
        elif chosen == 2:
            shapes: tuple[list[int], ...] = (
                entry["shape"][::-1],
                [],
                [0],
                [2**40, 2**40],
                [-1],
                [1, *entry["shape"]],
            )
            entry["shape"] = rng.choice(shapes)
        elif chosen == 3:
            entry["dtype"] = rng.choice(("F16", "BF16", "I8", "BOOL", "F64", "F8_E4M3", "X", 4))
        else:
            tree[name] = mutate_tree(rng, entry, lambda: rng.choice(NUMBERS))
    header = json.dumps(tree).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + tensors)


MANGLES: tuple[tuple[Mangle, str | None], ...] = (
    (_mangle_config, None),
    (_mangle_config, None),
    (_mangle_header, None),
    (_mangle_header, None),
    (_mangle_other_json, None),
    (_mangle_bytes, None),
    (_remove_file, None),
    (_mangle_index, SHARDED),
)
