"""Budgets of the waits and kernels of a round on a card. They may fall, and never rise.

`python -m tests.support.card.rounds --details MODE` names the places.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import checkpoints
from tests.support.card import flashinfer
from tests.support.card.rounds import FLASHINFER_OPTIONS, MODES, count_round, uneven

VERIFY: Mapping[str, tuple[int, int, int]] = {
    "greedy": (1, 8, 54),
    "T = 1": (1, 102, 148),
    "T = 0.7, top-p 0.9": (1, 132, 178),
    "T = 0.7, top-p 0.9, coupled": (1, 76, 122),
    "T = 0.7 with penalties": (1, 156, 202),
    "greedy with 5 logprobs": (2, 16, 62),
}
"""Waits of `verify`, its kernels for one sequence, and those for several with uneven drafts."""
PROPOSE_WAITS, PREPARE_WAITS = 1, 2
MOST_KERNELS = 1000
"""Kernels of `propose` and `prepare`, which depend on what was prepared and is captured."""

IN_GRAPHS: Mapping[str, int] = {"propose": 60, "verify": 9, "prepare": 257}
"""Kernels with FlashInfer, whose passes of up to 16 rows are one replay, however uneven."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("budgets") / "llama")


@pytest.mark.parametrize("mode", MODES)
def test_round_stays_within_its_budget(checkpoint: Path, mode: str) -> None:
    waits, alone, together = VERIFY[mode]
    for gammas, kernels in (([7], alone), (uneven(4), together)):
        counts = count_round(checkpoint, MODES[mode], gammas)
        budgets = {
            "propose": (PROPOSE_WAITS, MOST_KERNELS),
            "verify": (waits, kernels),
            "prepare": (PREPARE_WAITS, MOST_KERNELS),
        }
        for stage, (most_waits, most_kernels) in budgets.items():
            found = counts[stage]
            assert found.waits <= most_waits, f"{stage} of {len(gammas)}: {found.details}"
            assert found.kernels <= most_kernels, f"{stage} of {len(gammas)}: {found.kernels}"


def test_round_with_flashinfer_replays_its_passes(checkpoint: Path) -> None:
    with flashinfer.installed(graph_rows=(8, 16)):
        counts = count_round(checkpoint, MODES["greedy"], uneven(2), FLASHINFER_OPTIONS)
    waits = {"propose": PROPOSE_WAITS, "verify": 1, "prepare": PREPARE_WAITS}
    for stage, found in counts.items():
        assert found.waits <= waits[stage], f"{stage}: {found.details}"
        assert found.kernels <= IN_GRAPHS[stage], f"{stage}: {found.kernels}"
