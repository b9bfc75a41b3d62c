"""The command line in the report, and columns on a terminal."""

from __future__ import annotations

from pathlib import Path

from specserve.tools.bench.options import DEFAULT_CONCURRENCY, DEFAULT_WARM_UP, BenchOptions
from specserve.tools.bench.report import aligned, figure


def test_the_command_line_leaves_out_defaults() -> None:
    assert BenchOptions("http://h").command_line() == "specserve bench --url http://h"
    options = BenchOptions(
        "http://h", rate=2.5, gamma="auto", seed=0, ignore_eos=False, prompts=Path("my prompts")
    )
    assert (
        options.command_line() == "specserve bench --url http://h --rate 2.5 "
        "--prompts 'my prompts' --seed 0 --gamma auto --no-ignore-eos"
    )
    assert BenchOptions("http://h", chat=True).command_line().endswith("http://h --chat")
    assert BenchOptions("http://h", chat=False).command_line().endswith("http://h --no-chat")


def test_a_rate_has_no_clients_and_everything_else_has() -> None:
    assert (BenchOptions("u").clients, BenchOptions("u").num_warm_up) == (
        DEFAULT_CONCURRENCY,
        DEFAULT_CONCURRENCY,
    )
    assert (BenchOptions("u", rate=1.0).clients, BenchOptions("u", rate=1.0).num_warm_up) == (
        None,
        DEFAULT_WARM_UP,
    )
    assert (
        BenchOptions("u", concurrency=3).clients,
        BenchOptions("u", concurrency=3, warm_up=0).num_warm_up,
    ) == (3, 0)


def test_columns_of_figures_are_right_aligned() -> None:
    lines = list(aligned([("ms", "p50"), ("TTFT", "1.50")])) + list(
        aligned([("", "a", "b"), ("name", "10", "2")])
    )
    assert lines == ["ms    p50", "TTFT  1.50", "       a  b", "name  10  2"]


def test_a_figure_keeps_three_digits() -> None:
    assert [figure(value) for value in (0.0, 0.01234, 1.5, 99.99, 123.45, 12345.6)] == [
        "0",
        "0.0123",
        "1.50",
        "99.99",
        "123.5",
        "12346",
    ]
