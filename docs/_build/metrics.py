"""The metrics and the dashboard's panels as a page, from the table of metrics and from deploy/grafana.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specserve.metrics import FAMILIES, PREFIX, Family
from docs._build.table import code, table

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
INTRODUCTION = f"""# Metrics and dashboard

Made from `specserve/metrics.py` and `deploy/grafana.json` when these pages are built. Every name begins with `{PREFIX}`; `GET /metrics` gives the sum
over the whole application, so one address is scraped and not every node. Counters are raw: rates are made by whoever reads them.
[Operating](../operating.md#metrics) says which to look at first, the [runbook](../runbook.md) what to do.
"""
PANELS = """
## The dashboard

`deploy/grafana.json` (in Grafana: Dashboards, Import) has these panels. It is checked against the metrics that exist. No Grafana was at hand
to load it into, so there is no picture of it. `5m` stands below for the interval that Grafana chooses.

"""


def page() -> str:
    return INTRODUCTION + "\n" + table(("metric", "kind", "labels", "meaning"), map(_row, FAMILIES)) + PANELS + _panels()


def _row(family: Family) -> tuple[str, str, str, str]:
    return code(family.name), family.kind.value, ", ".join(map(code, family.labels)), family.help


def _panels() -> str:
    return table(("row", "panel", "line", "query"), _queries(json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]))


def _queries(panels: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    row = ""
    for panel in panels:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", ()):
            yield (
                row,
                panel["title"],
                target["legendFormat"].replace("{{", "").replace("}}", ""),
                code(target["expr"].replace("$__rate_interval", "5m")),
            )
