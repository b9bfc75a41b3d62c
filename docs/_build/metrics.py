"""Reference page of the metrics and of the dashboard's panels.

Made from `specserve/metric_families.py` and `deploy/grafana.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs._build.table import code, table
from specserve.metric_families import FAMILIES, MetricFamily
from specserve.metrics import PREFIX

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
INTRODUCTION = f"""# Metrics and dashboard

Made from `specserve/metric_families.py` and `deploy/grafana.json` when the site is built. Every
name begins with `{PREFIX}`. `GET /metrics` returns the sum over the whole application, so
Prometheus scrapes one address and not every node. Counters are raw; the reader computes rates.
[Operating](../guides/operating.md#metrics) says which to look at first, the
[runbook](../guides/runbook.md) what to do.
"""
PANELS = """
## The dashboard

`deploy/grafana.json` (in Grafana: Dashboards, Import) has these panels. A test compares it with
the metrics that exist. It has not been loaded into Grafana. `5m` stands for the interval that
Grafana chooses.

"""


def page() -> str:
    return (
        INTRODUCTION
        + "\n"
        + table(("metric", "kind", "labels", "meaning"), map(_row, FAMILIES))
        + PANELS
        + _panels()
    )


def _row(family: MetricFamily) -> tuple[str, str, str, str]:
    return code(family.name), family.kind.value, ", ".join(map(code, family.labels)), family.help


def _panels() -> str:
    return table(
        ("row", "panel", "line", "query"),
        _queries(json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]),
    )


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
