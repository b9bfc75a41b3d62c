"""The checkpoints that a config names: are they whole, can they be served, and do target and draft speak of the same tokens. Reads no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specserve.api.tokenizer import Text
from specserve.checkpoint_files import find_checkpoints
from specserve.config.cascade import STATISTICAL
from specserve.config.tree import TIED, Config, Draft
from specserve.models.checkpoints.describe import describe
from specserve.models.checkpoints.find import find_config
from specserve.models.checkpoints.weights import files
from specserve.tools.doctor.findings import Finding, bad, ok, warn

SHOWN = 5  # ids that differ
SIMILAR = 0.99  # of the ids: then it is likely the same tokenizer in another version
SAME = "a draft must give every id the target's meaning, for it proposes ids and the target judges them: "


def checkpoint(role: str, path: Path, *, local: bool) -> Iterator[Finding]:
    described = describe(path)
    spec = described.spec
    yield ok(
        role,
        f"{path}: {spec.model_type}, {described.num_parameters / 1e6:,.1f}M parameters, context {spec.max_context:,}",
    )
    yield from weights(role, path, local=local)
    if not (path / "generation_config.json").is_file() and role == "target":
        remedy = "texts end at config.json's eos_token_id; if they do not end, write generation_config.json with the right eos_token_id"
        yield warn(f"{role}, ending", "no generation_config.json", remedy)


def weights(role: str, path: Path, *, local: bool) -> Iterator[Finding]:
    """Every file of the index there, every tensor in it, and none cut off: the header says how long a file must be."""
    subject = f"{role}, weights"
    if not local and not any(path.glob("*.safetensors")):
        yield warn(
            subject,
            "not on this machine yet",
            "they are fetched when serving starts, on each node that needs them; that may take long",
        )
        return
    found = files(path)
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        yield bad(
            subject,
            f"{len(missing)} of {len(found)} files missing: {', '.join(missing[:SHOWN])}",
            "fetch the model again",
        )
        return
    held: dict[str, Path] = {}
    for file in found:
        try:
            with safe_open(file, framework="np") as opened:
                held.update(dict.fromkeys(opened.keys(), file))
        except (OSError, SafetensorError) as error:
            yield bad(
                subject,
                f"{file.name} cannot be read: {error}",
                "it is broken or cut off: fetch it again",
            )
            return
    lost = sorted(name for name, file in _indexed(path).items() if held.get(name) != path / file)
    if lost:
        yield bad(
            subject,
            f"{len(lost)} tensors of the index are in no file, such as {lost[0]}",
            "the index belongs to other files: fetch the model again",
        )
    else:
        size = sum(file.stat().st_size for file in found)
        yield ok(subject, f"{len(held)} tensors in {len(found)} files, {size / 2**20:,.0f} MiB")


def _indexed(path: Path) -> Mapping[str, str]:
    """The files that an index names, by tensor; a single file needs none."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file() or not index.is_file():
        return {}
    found: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return found


def tokenizer(text: Text) -> Iterator[Finding]:
    yield ok("tokenizer", f"{text.vocab_size:,} tokens")
    if text.has_template:
        yield ok("chat template", "the model's own")
    else:
        yield warn(
            "chat template",
            "none",
            "chats are written as `role: content` lines; a base model may do with it, a chat model needs its own template",
        )


def same_tokens(target: Text, draft: Text, *, key: str) -> Iterator[Finding]:
    """Which ids differ, what that means, and what to do."""
    differing = target.differing(draft)
    if not differing:
        yield ok(
            f"{key}, tokens", f"all {target.vocab_size:,} ids mean what they mean to the target"
        )
        return
    shown = ", ".join(
        f"{token} ({target.name(token)!r}, {draft.name(token)!r})" for token in differing[:SHOWN]
    )
    found = f"{len(differing):,} of {target.vocab_size:,} ids mean something else than to the target: {shown}"
    if len(differing) < (1 - SIMILAR) * target.vocab_size:
        found += (
            "; so few that one of the two tokenizers may have been changed since they were alike"
        )
    remedy = f"{SAME}choose a draft of the target's family, or draft.kind prompt_copy, max_gram, layer_skip or heads, which need no second tokenizer"
    yield bad(f"{key}, tokens", found, remedy)


def pair(config: Config) -> Iterator[Finding]:
    """Target and draft, each by itself and with one another."""
    target = find_config(config.target.path, revision=config.target.revision, key="target.path")
    yield from checkpoint("target", target, local=Path(config.target.path).exists())
    text = Text.load(target)
    yield from tokenizer(text)
    if config.draft.kind == "none":
        yield warn(
            "draft",
            "draft.kind is none",
            "without a draft nothing is speculated: name one with --draft, or choose a draft.kind",
        )
    elif config.draft.kind in TIED:
        yield from _fits(config)
    else:
        for part in config.draft.parts:
            yield from _part(config, part, text)


def _part(config: Config, part: Draft, text: Text) -> Iterator[Finding]:
    """A draft, or a stage of a cascade."""
    if part.kind != "neural" or part.path is None:
        yield ok("draft", f"{part.kind}, which needs no second model")
        if part.kind in STATISTICAL and part.path is not None:
            yield from _fits(config)
        return
    found = find_config(part.path, key="draft.path")
    yield from checkpoint("draft", found, local=Path(part.path).exists())
    yield from same_tokens(text, Text.load(found), key="draft")


def _fits(config: Config) -> Iterator[Finding]:
    """By the check that serving begins with."""
    find_checkpoints(config)
    yield ok("draft", f"{config.draft.kind}, which fits the target")
