"""Models that a config names on the hub, and whether it says which commit of them is served.

A branch or a tag may name another commit tomorrow, so that the nodes of a server, or a worker and
the one that replaces it, would load different weights. It asks no hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve.config.tree import Config

COMMIT = re.compile(r"[0-9a-f]{40}")
CHECKPOINT_REMEDY = (
    "give a directory with config.json and safetensors files, a GGUF file, or a hub name such as "
    "owner/model (HF_TOKEN opens those that are gated)"
)


@dataclass(frozen=True, slots=True)
class UnpinnedModel:
    """A hub name without a commit."""

    section: str  # of the config, such as draft.stages[0]
    name: str
    revision: str | None  # a branch or a tag, if there is one

    @property
    def finding(self) -> str:
        if self.revision is None:
            return f"{self.section}.path {self.name} is a hub name without {self.section}.revision"
        return f"{self.section}.revision {self.revision} of {self.name} is no commit and may change"

    @property
    def remedy(self) -> str:
        return f"set {self.section}.revision to the 40 digits of the commit that you have examined"

    def __str__(self) -> str:
        return f"{self.finding}; {self.remedy}"


def is_hub_name(path: str) -> bool:
    """Return whether a path that does not exist here can be a name on the hub."""
    return not path.startswith(("/", ".", "~")) and path.count("/") <= 1


def unpinned_models(config: Config) -> Iterator[UnpinnedModel]:
    """Yield the target and the draft models whose commit the hub would choose."""
    for number, part in enumerate(config.each_model):
        yield from _unpinned(part, f"models[{number}]." if config.models else "")


def _unpinned(config: Config, prefix: str) -> Iterator[UnpinnedModel]:
    named = [("target", config.target.path, config.target.revision)]
    for i, draft in enumerate(config.draft.drafter_configs):
        section = f"draft.stages[{i}]" if config.draft.stages else "draft"
        if draft.kind == "neural" and draft.path is not None:  # others draft from local files
            named.append((section, draft.path, draft.revision))
    for section, path, revision in named:
        is_local = Path(path).expanduser().exists() or not is_hub_name(path)
        if not is_local and not COMMIT.fullmatch(revision or ""):
            yield UnpinnedModel(prefix + section, path, revision)
