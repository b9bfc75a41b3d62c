"""LLM serving on Ray with exact, distributed speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve import errors
from specserve.errors import SpecserveError
from specserve.processor import cap_onednn, limit_spinning
from specserve.sampling_params import Sampling
from specserve.version import __version__

if TYPE_CHECKING:
    from specserve.llm.async_llm import AsyncLLM
    from specserve.llm.llm import LLM, Output
    from specserve.llm.ray_llm import open_ray_llm

# In every process that computes: all import this before torch, or at least before a product.
limit_spinning()
cap_onednn()

__all__ = [
    "LLM",
    "AsyncLLM",
    "Output",
    "Sampling",
    "SpecserveError",
    "__version__",
    "errors",
    "open_ray_llm",
]


def __getattr__(name: str) -> object:
    """Import `LLM`, `AsyncLLM`, `Output` and `open_ray_llm` when they are first used.

    They import the engine, and `open_ray_llm` torch and Ray, which take seconds; the config and the
    types alone do not need it. An LLM imports torch when it is opened.
    """
    if name in ("LLM", "Output"):
        from specserve.llm import llm

        return getattr(llm, name)
    if name == "AsyncLLM":
        from specserve.llm.async_llm import AsyncLLM

        return AsyncLLM
    if name == "open_ray_llm":
        from specserve.llm.ray_llm import open_ray_llm

        return open_ray_llm
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")
