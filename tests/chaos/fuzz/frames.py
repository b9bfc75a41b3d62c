"""Damaged frames of the wire format, decoded directly."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]
import numpy as np

from specserve.errors import BadFrame
from specserve.hidden_states import HiddenStates
from specserve.types import (
    Chunk,
    DraftStep,
    FinishReason,
    Logprobs,
    Origin,
    Policy,
    PreparedProposal,
    PromptLogprobs,
    PromptScoring,
    Proposal,
    Span,
    SparseDistribution,
    Stats,
    TokenRule,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.messages import (
    Chunks,
    Failure,
    Message,
    PreparedProposals,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
    pack,
    unpack,
)
from specserve.wire.version import VERSION
from tests.chaos.fuzz.mutations import (
    Mutation,
    cut,
    flip_bits,
    repeat,
    replace_bytes,
    splice,
)
from tests.chaos.fuzz.outcome import FuzzOutcome, measure

Frames = list[bytes]

# Bytes with a meaning to msgpack: containers, lengths, extensions.
MSGPACK_BYTES = bytes.fromhex(
    "80 8f 90 9f c0 c1 c2 c4 c6 c7 c9 cb cf d4 d9 db dc dd de df ff 00 7f"
)


def messages() -> list[Message]:
    """Return one message of each kind, with all that a frame can hold."""
    rng = np.random.default_rng(0)
    q = SparseDistribution(rng.integers(0, 4000, (3, 8)), rng.random((3, 8), dtype=np.float32))
    policy = Policy(
        Warp(
            temperature=0.7,
            top_k=5,
            logit_bias=((3, 1.5), (9, -2.0)),
            rule=TokenRule(3, (2,), ((5,), (6, 7)), (1, 2)),
        ),
        "block",
        seed=2**64 - 1,
        prompt_length=9,
        logprobs=2,
    )
    proposal = Proposal(1, 12, (3, 4, 5), q, 12)
    logprobs = (Logprobs(-0.1, (1, 2), (-0.1, -2.5)),)
    reals, counts = rng.random((3, 2), dtype=np.float32), np.ones((3, 2), np.uint32)
    scores = PromptLogprobs(1, reals[:, 0], counts[:, 0], counts, reals)
    scoring = PromptScoring(2, 7)
    hidden = tuple(HiddenStates(i, 4, 2, "bfloat16", rng.bytes(24)) for i in (1, 2))
    return [
        Propose(1, 0.25, (DraftStep(1, 2, (3, 4), 5, policy),), (6, 7), hidden),
        Proposals(1, (proposal,), 0.01, 12, (Span("draft", 0.1, 0.2),)),
        PreparedProposals(1, (PreparedProposal(8, proposal),)),
        Verify(
            1,
            (VerifyStep(1, 12, (5,), (3, 4, 5), q, policy, True, gamma=2, scoring=scoring),),
            (6,),
        ),
        Verdicts(
            1,
            (Verdict(1, 1, 2, logprobs, prompt_logprobs=scores),),
            0.1,
            3,
            4,
            5,
            (Span("verify", 0.1, 0.2),),
            hidden,
        ),
        Failure(1, "OutOfPages", "no room"),
        Chunks(
            (
                Chunk(
                    1,
                    7,
                    (2,),
                    (Origin.BONUS,),
                    logprobs,
                    FinishReason.ERROR,
                    Stats("block", True, 1, 2, 3, 4),
                    "fell over",
                    scores,
                ),
            )
        ),
        Stop(),
    ]


def fuzzed_frames(rng: random.Random) -> Iterator[Frames]:
    """Yield damaged messages without end.

    Bits are flipped, bytes replaced, parts cut out, repeated or exchanged between messages, and
    heads made of plausible pieces.
    """
    good = [[bytes(frame) for frame in pack(message)] for message in messages()]
    mutations: tuple[Mutation, ...] = (
        flip_bits,
        replace_bytes(MSGPACK_BYTES),
        cut,
        repeat,
        lambda rng, frame: splice(rng, frame, rng.choice(rng.choice(good))),
        _invent,
    )
    while True:
        frames = list(rng.choice(good))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(len(frames))
            frames[at] = rng.choice(mutations)(rng, frames[at])
        if rng.random() < 0.05:
            frames = (
                frames[:-1] or [b""]
                if rng.random() < 0.5
                else [*frames, rng.randbytes(rng.randrange(64))]
            )
        yield frames


def _invent(rng: random.Random, frame: bytes) -> bytes:
    kind = rng.choice(
        (
            "Propose",
            "Proposals",
            "PreparedProposals",
            "Verify",
            "Verdicts",
            "Failure",
            "Chunks",
            "Stop",
            "Gossip",
            "",
        )
    )
    rows = [_value(rng, 3) for _ in range(rng.randrange(4))]
    opening = (b"specserve", VERSION, kind, rng.choice((len(rows), 0, 2**63, -1)), _value(rng, 3))
    return b"".join(map(msgpack.packb, (opening, *rows)))


def _value(rng: random.Random, depth: int) -> object:
    plain = (
        None,
        True,
        0,
        -1,
        2**63,
        1.5,
        math.nan,
        "",
        "block",
        *map(bytes, (0, 8, 16, 24, 40)),
        rng.randbytes(rng.randrange(80)),
    )
    return (
        rng.choice(plain)
        if not depth or rng.random() < 0.5
        else tuple(_value(rng, depth - 1) for _ in range(rng.randrange(6)))
    )


def fuzz_frames(count: int, seed: int = 0) -> FuzzOutcome:
    """Decode frames with `unpack`. A message that it accepts must be one that can be packed."""
    frames = fuzzed_frames(random.Random(seed))

    def decode_one() -> str:
        try:
            message = unpack(next(frames))
        except BadFrame:
            return "refused"
        pack(message)
        return "decoded as messages"

    return measure("wire frames, decoded", count, decode_one)
