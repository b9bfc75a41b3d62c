"""JSON as it goes to clients: a model's text in UTF-8, usage, and the `specserve` object."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.responses import Response

from specserve.types import Stats

dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def respond(content: object) -> Response:
    return Response(dumps(content), media_type="application/json")


def usage(*, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def speculation(stats: Sequence[Stats]) -> dict[str, object]:
    """What speculation did for all continuations of a request together. They share one verifier."""
    rounds, accepted = sum(one.rounds for one in stats), sum(one.accepted for one in stats)
    return {
        "verifier": stats[0].verifier,
        "lossless": all(one.lossless for one in stats),
        "rounds": rounds,
        "drafted": sum(one.drafted for one in stats),
        "accepted": accepted,
        "mean_accepted_length": accepted / rounds if rounds else 0.0,
        "target_passes": sum(one.target_passes for one in stats),
        "anticipated": sum(one.anticipated for one in stats),
        "resumed": sum(one.resumed for one in stats),
    }
