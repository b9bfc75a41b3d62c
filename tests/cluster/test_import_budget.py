"""The bytes of pages that a round may import follow from what earlier imports took."""

from __future__ import annotations

import pytest

from specserve.cluster.import_budget import FIRST_BYTES, GROWTH, MAX_SHARE, ImportBudget

MIB = 2**20
OVERHEAD_S = 0.5e-3
"""Time that a round takes beyond its pass, without an import."""


class Rounds:
    """Rounds with passes of a constant length, and a link of a constant speed."""

    def __init__(self, *, pass_s: float, bytes_per_s: float, fixed_s: float = 0.0) -> None:
        self.budget = ImportBudget()
        self.pass_s, self.bytes_per_s, self.fixed_s = pass_s, bytes_per_s, fixed_s

    def run(self, number: int, *, imports: bool = True) -> list[float]:
        """Import what may be imported in each round; return by how much each was lengthened."""
        longer = []
        for _ in range(number):
            num_bytes = self.budget.num_bytes if imports else 0
            import_s = self.fixed_s + num_bytes / self.bytes_per_s if num_bytes else 0.0
            self.budget.observe(num_bytes, pass_s=self.pass_s, overhead_s=OVERHEAD_S + import_s)
            longer.append(import_s / self.pass_s)
        return longer


@pytest.mark.parametrize("bytes_per_s", [50e6, 1e9, 10e9])
@pytest.mark.parametrize("pass_s", [0.005, 0.04])
@pytest.mark.parametrize("fixed_s", [0.0, 0.5e-3])
def test_imports_lengthen_rounds_by_the_share_whatever_link_and_pass(
    bytes_per_s: float, pass_s: float, fixed_s: float
) -> None:
    rounds = Rounds(pass_s=pass_s, bytes_per_s=bytes_per_s, fixed_s=fixed_s)
    rounds.run(5, imports=False)
    longer = rounds.run(60)
    assert longer[-1] == pytest.approx(MAX_SHARE, rel=0.05)
    assert max(longer[1:]) < 1.5 * MAX_SHARE


def test_the_first_import_is_small_and_each_further_one_at_most_a_multiple() -> None:
    rounds = Rounds(pass_s=0.1, bytes_per_s=1e12)
    rounds.run(5, imports=False)
    sizes = []
    for _ in range(6):
        sizes.append(rounds.budget.num_bytes)
        rounds.run(1)
    assert sizes == [FIRST_BYTES * GROWTH**number for number in range(6)]


def test_a_link_that_becomes_slow_delays_few_rounds() -> None:
    rounds = Rounds(pass_s=0.02, bytes_per_s=2e9)
    rounds.run(5, imports=False)
    rounds.run(40)
    rounds.bytes_per_s /= 10
    assert sum(longer > 1.5 * MAX_SHARE for longer in rounds.run(40)) <= 4


def test_a_round_that_stalls_once_is_forgotten() -> None:
    rounds = Rounds(pass_s=0.02, bytes_per_s=1e9)
    rounds.run(5, imports=False)
    rounds.run(20)
    usual = rounds.budget.num_bytes
    rounds.budget.observe(usual, pass_s=0.02, overhead_s=0.5)
    assert rounds.budget.num_bytes < usual / 10
    rounds.run(60)
    assert rounds.budget.num_bytes == pytest.approx(usual, rel=0.05)


def test_the_share_is_of_the_passes_of_this_time() -> None:
    rounds = Rounds(pass_s=0.01, bytes_per_s=1e9)
    rounds.run(5, imports=False)
    rounds.run(40)
    before = rounds.budget.num_bytes
    rounds.pass_s *= 3
    rounds.run(60)
    assert rounds.budget.num_bytes == pytest.approx(3 * before, rel=0.1)


def test_what_idle_rounds_import_says_what_the_link_takes() -> None:
    budget = ImportBudget()
    for _ in range(5):
        budget.observe(0, pass_s=0.02, overhead_s=OVERHEAD_S)
    budget.observe(32 * MIB, pass_s=None, overhead_s=OVERHEAD_S + 32 * MIB / 1e9)
    assert budget.num_bytes == pytest.approx(MAX_SHARE * 0.02 * 1e9, rel=0.01)


def test_after_imports_alone_the_first_round_with_sequences_takes_one_transfer() -> None:
    budget = ImportBudget()
    budget.observe(MIB, pass_s=None, overhead_s=0.001)
    assert budget.num_bytes == 0, "no length of a round is known"
