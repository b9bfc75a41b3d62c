"""Distributed speculative decoding: a large language model served several times faster, without changing what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve import errors
from specserve.errors import SpecserveError
from specserve.sampling_params import Sampling

if TYPE_CHECKING:
    from specserve.llm import LLM, Output

__version__ = "0.1.0"
__all__ = ["LLM", "Output", "Sampling", "SpecserveError", "__version__", "errors"]


def __getattr__(name: str) -> object:
    """LLM brings torch along, which takes seconds; who needs the config or the types alone does not wait for it."""
    if name in ("LLM", "Output"):
        from specserve import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")
