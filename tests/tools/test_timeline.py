"""The picture of a trace: well-formed, self-contained, and true to the rounds."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from specserve.engine.batch import Outcome
from specserve.engine.pacer import Pacer
from specserve.engine.trace import Exchange, Round, TraceJournal
from specserve.errors import BadValue
from specserve.metrics import Registry
from specserve.tools import timeline
from specserve.types import Span


def trace(*, rounds: int = 20) -> dict[str, object]:
    """Return rounds of 10 ms: 3 of 4 drafts accepted, 9 ms to verify, 4 ms of anticipation."""
    journal = TraceJournal(Registry(), max_rounds=100)
    for number in range(rounds):
        at = number * 0.010
        outcomes = (Outcome(0, 4, 3, number % 4 != 0),)
        journal.record_round(
            Round(
                number,
                at,
                at + 0.0005,
                at + 0.0098,
                at + 0.0099,
                1,
                5,
                0,
                outcomes,
                4,
                Pacer(4, max_gamma=8).decision,
            )
        )
        journal.record_exchange(
            Exchange(
                "draft",
                at,
                at + 0.0005,
                (
                    Span("anticipate", at - 0.009, at - 0.005),
                    Span("draft", at + 0.0001, at + 0.0004),
                ),
            )
        )
        journal.record_exchange(
            Exchange(
                "target", at + 0.0005, at + 0.0098, (Span("verify", at + 0.0006, at + 0.0096),)
            )
        )
    return json.loads(json.dumps(journal.trace()))  # type: ignore[no-any-return]


def test_every_shown_round_has_a_cell_for_each_draft_and_each_token_of_the_target(
    tmp_path: Path,
) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(trace()))
    timeline.main(
        [
            str(tmp_path / "trace.json"),
            "--out",
            str(tmp_path / "trace.svg"),
            "--first",
            "4",
            "--rounds",
            "8",
        ]
    )
    picture = (tmp_path / "trace.svg").read_text()
    root = xml.fromstring(picture)
    fills = [box.get("fill") for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    legend = 1
    assert fills.count(timeline.COLOURS["accepted"]) == 8 * 3 + legend
    assert fills.count(timeline.COLOURS["rejected"]) == 8 + legend
    assert fills.count(timeline.COLOURS["next"]) == 8 + legend
    assert fills.count(timeline.COLOURS["draft"]) == 8 + legend
    words = root.find("{http://www.w3.org/2000/svg}title").text  # type: ignore[union-attr]
    assert (
        words
        == "8 rounds, 32 tokens, 9.9 ms a round; target busy 90% of the time; 6 of 8 proposals "
        "prepared in advance"
    )
    assert "href" not in picture


def test_a_trace_without_decoding_is_refused() -> None:
    with pytest.raises(BadValue, match="no round"):
        timeline.select_rounds({"traceEvents": []}, first=None, count=5)
