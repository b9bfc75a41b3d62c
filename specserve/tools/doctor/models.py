"""Findings about checkpoints: complete, servable, and with the same tokens in target and draft.

Reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import find_checkpoints
from specserve.config.features import part
from specserve.config.hub_models import unpinned_models
from specserve.config.kinds import NGRAM_KINDS
from specserve.config.sections import SELF_SPECULATIVE_KINDS, DraftConfig
from specserve.config.tree import Config
from specserve.errors import ModelError
from specserve.models.checkpoints.find import describe, find_config
from specserve.models.checkpoints.generation_config import sampling_defaults
from specserve.models.checkpoints.gguf.tensors import GgufFile
from specserve.models.checkpoints.tensors import open_file
from specserve.models.checkpoints.weights import weight_files
from specserve.models.model import ModelOptions
from specserve.models.reproducibility import ON_GPU, expected_reason
from specserve.tools.doctor.findings import Finding, bad, guarded, ok, warn
from specserve.tools.doctor.room import on_gpu

NUM_SHOWN = 5
"""Differing ids that a finding lists."""
SIMILAR = 0.99
"""Share of equal ids from which the tokenizer is likely the same one in another version."""
SAME_MEANING = (
    "a stage must give every id the target's meaning, for it proposes ids and the target verifies "
    "them: "
)


def checkpoint(role: str, path: Path, *, local: bool) -> Iterator[Finding]:
    """Check one checkpoint by its config, its weights' headers and its end tokens."""
    described = describe(path)
    spec = described.spec
    yield ok(
        role,
        f"{path}: {spec.model_type}, {described.num_parameters / 1e6:,.1f}M parameters, "
        f"context {spec.max_context:,}",
    )
    yield from weights(role, path, local=local)
    if not (path / "generation_config.json").is_file() and role == "target":
        remedy = (
            "texts end at config.json's eos_token_id; if they do not end, write "
            "generation_config.json with the right eos_token_id"
        )
        yield warn(f"{role}, ending", "no generation_config.json", remedy)


def sampling(target: Path, config: Config) -> Iterator[Finding]:
    """Name the sampling that the target recommends."""
    if recommended := sampling_defaults(target, config.target):
        stated = ", ".join(f"{name} {value:g}" for name, value in recommended.items())
        yield ok("target, sampling", f"{stated}, where a request does not say otherwise")


def adapters(config: Config) -> Iterator[Finding]:
    """Check that the adapters can be read, and are of the target."""
    if paths := config.adapters.paths:
        target = find_config(config.target.path, revision=config.target.revision, key="target.path")
        part("adapters.store:require_adapters_fit")(target, config)
        yield ok("adapters", ", ".join(f"{name}: {path}" for name, path in paths.items()))


def weights(role: str, path: Path, *, local: bool) -> Iterator[Finding]:
    """Check that the files and tensors of the index exist, and that no file is truncated.

    The header of a file states its length.
    """
    subject = f"{role}, weights"
    if not local and not any(path.glob("*.safetensors")):
        yield warn(
            subject,
            "not on this machine yet",
            "they are fetched when serving starts, on each node that needs them; that may take "
            "long",
        )
        return
    found = weight_files(path)
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        yield bad(
            subject,
            f"{len(missing)} of {len(found)} files missing: {', '.join(missing[:NUM_SHOWN])}",
            "fetch the model again",
        )
        return
    yield from _tensors(subject, path, found)


def _tensors(subject: str, path: Path, files: Sequence[Path]) -> Iterator[Finding]:
    """Check the files' headers, and that they have the tensors of the index."""
    stored: dict[str, Path] = {}
    count = 0
    for file in files:
        try:
            opened = open_file(file)
            stored.update(dict.fromkeys(opened.keys(), file))
            count += opened.num_stored if isinstance(opened, GgufFile) else len(opened.keys())
        except ModelError as error:
            yield bad(subject, str(error), "it is broken or cut off: fetch it again")
            return
    lost = sorted(name for name, file in _indexed(path).items() if stored.get(name) != path / file)
    if lost:
        yield bad(
            subject,
            f"{len(lost)} tensors of the index are in no file, such as {lost[0]}",
            "the index belongs to other files: fetch the model again",
        )
    else:
        size = sum(file.stat().st_size for file in files)
        yield ok(subject, f"{count} tensors in {len(files)} files, {size / 2**20:,.0f} MiB")


def _indexed(path: Path) -> Mapping[str, str]:
    """Return the files that an index names, by tensor; a single file needs no index."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file() or not index.is_file():
        return {}
    found: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return found


def tokenizer(text: Tokenizer) -> Iterator[Finding]:
    """Check the tokenizer and its chat template."""
    yield ok("tokenizer", f"{text.vocab_size:,} tokens")
    if text.has_chat_template:
        yield ok("chat template", "the model's own")
    else:
        yield warn(
            "chat template",
            "none",
            "chats are written as `role: content` lines; a base model may do with it, a chat model "
            "needs its own template",
        )


def same_tokens(
    target: Tokenizer, draft: Tokenizer, *, key: str, is_stage: bool = False
) -> Iterator[Finding]:
    """Check that every id has the same meaning in both tokenizers, or can be translated.

    A stage of a cascade is not translated.
    """
    differing = target.differing_ids(draft)
    if not differing:
        yield ok(
            f"{key}, tokens", f"all {target.vocab_size:,} ids mean what they mean to the target"
        )
        return
    shown = ", ".join(
        f"{token} ({target.token_name(token)!r}, {draft.token_name(token)!r})"
        for token in differing[:NUM_SHOWN]
    )
    found = (
        f"{len(differing):,} of {target.vocab_size:,} ids mean something else than to the target: "
        f"{shown}"
    )
    if len(differing) < (1 - SIMILAR) * target.vocab_size:
        found += (
            "; so few that one of the two tokenizers may have been changed since they were alike"
        )
    remedy = (
        "choose a draft of the target's family, or draft.kind prompt_copy, "
        "max_gram, layer_skip or heads, which need no second tokenizer"
    )
    if is_stage:
        yield bad(f"{key}, tokens", found, f"{SAME_MEANING}{remedy}")
    elif target.has_other_meanings(draft):
        shared = part("other_tokenizer.opening:describe_overlap")(target, draft, key)
        yield warn(
            f"{key}, tokens",
            found,
            f"{shared}, and draft tokens are translated, which costs acceptance: {remedy}",
        )
    else:
        yield ok(f"{key}, tokens", f"{found}; only one of the two has each of them")


def reproducible(config: Config) -> Iterator[Finding]:
    """Say whether the target's texts depend on what else is served, and why they may."""
    target, own = config.target, ModelOptions.from_config(config.target, config)
    path = find_config(target.path, revision=target.revision, key="target.path")
    if on_gpu(target):
        reason: str | None = ON_GPU
    else:
        reason = expected_reason(path, dtype=own.dtype, attention=own.attention, kernel=own.kernel)
    if reason is None:
        yield ok("reproducible", "true: rows keep their bits in all kernels, as tried here")
    else:
        remedy = "texts may depend on what else is served; their distribution does not"
        yield warn("reproducible", f"false: {reason}", remedy)


def revisions(config: Config) -> Iterator[Finding]:
    """Warn of models of the hub whose commit the config leaves open."""
    for model in unpinned_models(config):
        yield warn(f"{model.section}, revision", model.finding, model.remedy)


def pair(config: Config) -> Iterator[Finding]:
    """Check target and draft, each alone and both together."""
    target = find_config(config.target.path, revision=config.target.revision, key="target.path")
    yield from checkpoint("target", target, local=Path(config.target.path).exists())
    yield from guarded("target, sampling", lambda: sampling(target, config))
    if config.demo.note is not None:
        yield ok("demo", config.demo.note)
    text = Tokenizer.load(target)
    yield from tokenizer(text)
    if config.draft.kind == "none":
        yield warn(
            "draft",
            "draft.kind is none",
            "without a draft nothing is speculated: name one with --draft, or choose a draft.kind",
        )
    elif config.draft.kind in SELF_SPECULATIVE_KINDS:
        yield from _fits(config)
    else:
        for draft in config.draft.drafter_configs:
            yield from _drafter(config, draft, text)


def _drafter(config: Config, draft: DraftConfig, text: Tokenizer) -> Iterator[Finding]:
    """Check a draft, or one stage of a cascade."""
    if draft.kind != "neural" or draft.path is None:
        yield ok("draft", f"{draft.kind}, which needs no second model")
        if draft.kind in NGRAM_KINDS and draft.path is not None:
            yield from _fits(config)
        return
    found = find_config(draft.path, revision=draft.revision, key="draft.path")
    yield from checkpoint("draft", found, local=Path(draft.path).exists())
    own = Tokenizer.load(found)
    yield from same_tokens(text, own, key="draft", is_stage=bool(config.draft.stages))


def _fits(config: Config) -> Iterator[Finding]:
    """Run the check with which serving begins."""
    find_checkpoints(config)
    yield ok("draft", f"{config.draft.kind}, which fits the target")
