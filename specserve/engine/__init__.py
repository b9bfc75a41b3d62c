"""The engine: schedule, propose, verify and commit for many requests at once.

Knows token ids, pages and seconds; no tensors, no Ray, no HTTP.
"""

from __future__ import annotations

from specserve.engine.coordinator import Coordinator

__all__ = ["Coordinator"]
