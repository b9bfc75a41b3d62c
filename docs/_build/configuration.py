"""The configuration as a page: keys, defaults and ranges as specserve/config/tree.py declares them, and what each is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from specserve.config.tree import Config
from docs._build.table import code, table
from specserve.config.fields import Rule
from specserve.config.cascade import Stage

INTRODUCTION = """# Configuration

One tree for `specserve serve --config FILE` (YAML), for `--set a.b=c`, for `LLM(**{"a.b": c})` and for `args:` in the files of `serve deploy`. Made
from `specserve/config/tree.py` when these pages are built. An unknown key is refused with the nearest known one; null is the same as leaving the key out.
"""
STAGE = "draft.stages[i]"


@dataclass(frozen=True, slots=True)
class Key:
    """One line of the tree."""

    name: str  # dotted
    default: object
    expects: str


def page() -> str:
    listed = list(all_keys())
    sections = dict.fromkeys(key.name.rpartition(".")[0] for key in listed)
    parts = [INTRODUCTION, *(_section(section, [key for key in listed if key.name.rpartition(".")[0] == section]) for section in sections)]
    return "\n".join(parts)


def all_keys() -> Iterator[Key]:
    """Every key that a config may have; those of a stage below `draft.stages[i]`."""
    yield from _keys(Config, "")
    yield from _keys(Stage, STAGE)


def _keys(kind: type[Any], path: str) -> Iterator[Key]:
    blank = kind()
    for field in fields(kind):
        rule: Rule = field.metadata["rule"]
        name = f"{path}.{field.name}" if path else field.name
        if rule.keys is None:
            yield Key(name, getattr(blank, field.name), rule.expects)
        else:
            yield from _keys(rule.keys, name)


def _section(section: str, listed: list[Key]) -> str:
    rows = [(code(key.name.rpartition(".")[2]), _default(key.default), key.expects, MEANINGS[key.name]) for key in listed]
    return f"## {code(section) if section else 'At the top'}\n\n" + table(("key", "default", "takes", "meaning"), rows)


def _default(value: object) -> str:
    if value is None or value in ("", (), {}):
        return ""
    return code(str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value)


# What a type and a range cannot say. A key that is missing here fails the build and tests/docs/test_generated_pages.py.
MEANINGS: Mapping[str, str] = {
    "model": "The name shown to clients. Left out, it is the last part of `target.path`; `demo` for the pair that is shipped.",
    "target.path": "The model that decides what is written: a directory or a hub name. Left out, it is the demo pair's, with that pair's draft.",
    "target.revision": "Of a hub name.",
    "target.dtype": "`auto` is bfloat16 where the processor has it, else float32.",
    "target.tensor_parallel": "How many ranks share the target's weights, each on a device of its own.",
    "target.device": "`auto` is a GPU where there is one.",
    "target.threads": "Of a CPU; left out, torch's own choice.",
    "target.attention": "`invariant` gives the same bits in any company; `auto` takes it on CPUs, on GPUs `flash` if installed, else `sdpa`.",
    "target.label_selector": "Labels that a node must have for Ray to place ranks there.",
    "draft.kind": "What drafts ([the kinds](../your-model.md)). Left out, `neural` if there is a path, else `none`.",
    "draft.path": "Of a model, of tables that `specserve tables` made, or of heads that `specserve heads` made.",
    "draft.skip": "Layers that `layer_skip` leaves out; left out, every second one between the first and the last.",
    "draft.learn": "Whether tables follow the served texts; left out, if there are none to begin with.",
    "draft.dtype": "As `target.dtype`.",
    "draft.device": "As `target.device`.",
    "draft.threads": "As `target.threads`.",
    "draft.num_gpus": "GPUs that Ray sets aside for the draft; a fraction shares one.",
    "draft.label_selector": "As `target.label_selector`.",
    "draft.support": "It samples from that many of its likeliest tokens, and sends their probabilities along.",
    "draft.stages": "Of a cascade, from the largest drafter to the smallest.",
    "draft.k": "`k[i][j]`: tokens asked of stage j by the target (i = 0) or by the stage before stage i ([cascades](../cascades.md)).",
    "draft.lenience": "Of reviews between stages: one number for all, or one for each stage that reviews. Exact all the same.",
    f"{STAGE}.kind": "What this stage is.",
    f"{STAGE}.path": "Of its model or its tables.",
    f"{STAGE}.dtype": "Left out, as the draft has it.",
    f"{STAGE}.device": "Left out, as the draft has it.",
    f"{STAGE}.support": "Left out, as the draft has it.",
    f"{STAGE}.learn": "As `draft.learn`.",
    "speculation.verifier": "How guesses are judged ([exactness](../exactness.md)); `auto` is `block`, and `coupled` for requests with a seed.",
    "speculation.gamma": "Draft tokens a round; `auto` lets the pacer choose, 0 is plain decoding.",
    "speculation.max_gamma": "The most that the pacer or a request may choose.",
    "speculation.anticipation.enabled": "Whether the draft prepares proposals while the target verifies.",
    "speculation.anticipation.fanout": "Continuations prepared at each place; `auto` prepares as many as pay.",
    "speculation.lenience": "Of the verifier `lenient` alone. Above 1 it is lossy, and every response says so.",
    "cache.page_size": "Positions a page of keys and values.",
    "cache.memory_fraction": "Share of the memory that is free beside the weights; left out, half of it.",
    "cache.pages": "The number of pages itself, instead.",
    "cache.prefix_caching": "Whether equal beginnings of prompts share pages.",
    "limits.max_context": "Prompt and continuation together; left out, the model's own.",
    "limits.max_running": "Sequences in a round, an engine.",
    "limits.max_queued": "Requests that wait beyond those, an engine; more get 429.",
    "limits.request_timeout_s": "After so long a request is answered with 408, or its stream with an error.",
    "limits.max_body_bytes": "Of a request; more gets 413.",
    "replicas.min": "Engines that run at least.",
    "replicas.max": "Engines that run at most.",
    "replicas.target_ongoing_requests": "Requests an engine above which another one is started.",
    "replicas.upscale_delay_s": "How long it must be so before one is.",
    "replicas.downscale_delay_s": "How long it must be otherwise before one is given up.",
    "replicas.surge_percent": "Per cent of the engines, at least one, that an update starts before old ones go; left out, 25 if there is room.",
    "replicas.gateways": "Gateways at most; they scale apart from the engines.",
    "http.host": "For `specserve serve`; files of `serve deploy` say it in `http_options`.",
    "http.port": "Likewise.",
    "http.api_keys_file": "Names, keys and rates ([security](../security.md#keys)); left out, everyone is served.",
    "http.open_paths": "Paths that need no key.",
    "http.cors_origins": "Pages of other origins that browsers may ask from.",
    "http.root_path": "Where a proxy in front has put the server.",
    "http.label_selector": "Ray labels of the nodes that gateways may run on: clients' connections end with the node.",
    "http.tls_cert": "A PEM file; with both of these https alone is spoken.",
    "http.tls_key": "The key that belongs to it.",
    "logs.format": "`json` writes an object a line.",
    "logs.level": "Of our own lines.",
    "logs.prompts": "Whether lines may quote what was asked.",
    "faults.round_deadline_s": "A round that takes longer has lost a rank.",
    "faults.max_restarts": "Restarts in a row that do not help, before Serve replaces the replica.",
}
