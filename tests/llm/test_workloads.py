"""Random workloads, by which two checkouts are compared, have the same tokens each time."""

from __future__ import annotations

from tests.support.workloads import digests


def test_a_workload_has_the_same_tokens_each_time_and_with_any_draft() -> None:
    found = digests(16, kinds=("none", "prompt_copy"), dtypes=("float32",))
    assert found == digests(16, kinds=("none", "prompt_copy"), dtypes=("float32",))
    assert len(set(found.values())) == 8
    for number in range(8):
        assert found[f"none float32 {number}"] == found[f"prompt_copy float32 {number}"]
