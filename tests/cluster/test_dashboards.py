"""Rules, dashboard and scrape configuration in deploy/: their metrics and labels exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.config.sections import LimitsConfig
from specserve.metric_families import FAMILIES, MetricKind
from specserve.metrics import MODEL_LABEL, PREFIX

ROOT = Path(__file__).parents[2]
FUNCTIONS = {
    "sum",
    "max",
    "avg",
    "rate",
    "increase",
    "histogram_quantile",
    "avg_over_time",
    "absent",
    "vector",
}
WORDS = {"by", "on", "ignoring", "group_left", "and", "or", "le"}
TARGETS_OWN = {"up": {"job"}}  # added by Prometheus itself


def _series() -> dict[str, set[str]]:
    """Return every name that a query may use, with its labels."""
    known = dict(TARGETS_OWN)
    for family in FAMILIES:
        if family.kind is MetricKind.HISTOGRAM:
            known |= {
                f"{PREFIX}{family.name}_{part}": {*family.labels, MODEL_LABEL, *extra}
                for part, extra in (("bucket", {"le"}), ("sum", ()), ("count", ()))
            }
        else:
            known[PREFIX + family.name] = {*family.labels, MODEL_LABEL}
    return known


def _rules() -> list[dict[str, Any]]:
    tree = yaml.safe_load((ROOT / "deploy/prometheus-rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in tree["groups"] for rule in group["rules"]]


def _dashboard() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
    return tree


def _targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in _dashboard()["panels"]:
        yield from ((panel["title"], target) for target in panel.get("targets", ()))


RULES, TARGETS = _rules(), list(_targets())
RECORDED = {
    rule["record"]: set(re.findall(r"^sum by \((\w+)\)", rule["expr"]))
    for rule in RULES
    if "record" in rule
}
EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=rule.get("record") or rule["alert"]) for rule in RULES),
    *(
        pytest.param(target["expr"], id=f"{title}: {target['legendFormat']}")
        for title, target in TARGETS
    ),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_name_in_an_expression_is_a_metric_with_such_labels(expression: str) -> None:
    known = _series() | RECORDED
    bare = re.sub(r'"[^"]*"', '""', expression.replace("$__rate_interval", "5m"))
    assert all(
        bare.count(opening) == bare.count(closing) for opening, closing in ("()", "[]", "{}")
    )
    for name, selector in re.findall(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})", bare):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= known[name], name
    grouped = set(re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", bare))
    without = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|ignoring|on) \([^)]*\)", "", bare)
    names = set(re.findall(r"(?<![\w.])[a-zA-Z_:][\w:]*", without)) - FUNCTIONS - WORDS
    assert names, "an expression asks for something"
    assert names <= set(known), names - set(known)
    labels = {label for name in names for label in known[name]}
    assert {
        label.strip() for group in grouped for label in group.split(",") if label.strip()
    } <= labels


def test_a_misspelt_metric_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        test_every_name_in_an_expression_is_a_metric_with_such_labels(
            "sum(rate(specserve_generated_tokens_total[5m]))"
        )
    with pytest.raises(AssertionError):
        test_every_name_in_an_expression_is_a_metric_with_such_labels(
            'specserve_kv_cache_usage_perc{rank="0"}'
        )


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_are_never_shown_raw_and_gauges_never_as_rates(expression: str) -> None:
    for family in FAMILIES:
        name = PREFIX + family.name
        uses = len(re.findall(rf"{name}(?:_bucket|_sum|_count)?\b", expression))
        rated = len(
            re.findall(
                rf"(?:rate|increase)\({name}(?:_bucket|_sum|_count)?(?:\{{[^}}]*\}})?\[", expression
            )
        )
        is_gauge = family.kind in (MetricKind.SUMMED, MetricKind.AVERAGED)
        assert rated == (0 if is_gauge else uses), name


def test_legends_name_labels_that_their_query_keeps() -> None:
    for title, target in TARGETS:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            name = re.search(rf"{PREFIX}\w+", target["expr"])
            assert name is not None
            assert f"by ({label})" in target["expr"] or label in _series()[name[0]], title


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    runbook = (ROOT / "docs/guides/runbook.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    alerts = [rule for rule in RULES if "alert" in rule]
    assert {alert["alert"] for alert in alerts} <= headings
    for alert in alerts:
        page, _, heading = alert["annotations"]["runbook_url"].partition("#")
        assert page == "https://docs.example.com/guides/runbook.html"
        assert heading == alert["alert"].lower()
        assert alert["labels"]["severity"] in ("page", "warn")
        assert alert["annotations"]["summary"]


def test_metrics_that_documents_name_exist() -> None:
    # The limits' keys have endings like metrics' names.
    names = {family.name for family in FAMILIES} | {key.name for key in fields(LimitsConfig)}
    for page in ("docs/guides/runbook.md", "docs/guides/operating.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(
            r"`(?:specserve_)?([a-z_]+_(?:total|seconds|perc|fraction|running|waiting))"
            r"(?:\{\w+\})?`",
            text,
        ):
            assert name in names, f"{page} names {name}"


def test_the_dashboard_shows_all_models_or_one_of_them() -> None:
    variables = {one["name"]: one for one in _dashboard()["templating"]["list"]}
    assert (
        variables["model"]["query"]["query"] == f"label_values(specserve_replicas, {MODEL_LABEL})"
    )
    assert variables["model"]["allValue"] == ".*", "metrics of a single model have no such label"
    for title, target in TARGETS:
        if not re.search("rate_limited_total|gateway_|pool_", target["expr"]):  # know no models
            uses = len(re.findall(rf"{PREFIX}\w+", target["expr"]))
            assert target["expr"].count(f'{{{MODEL_LABEL}=~"$model"}}') == uses, title


def test_the_dashboard_shows_the_documented_metrics() -> None:
    shown = " ".join(target["expr"] for _, target in TARGETS)
    for name in (
        *(
            "accepted_tokens_per_pos_total",
            "anticipation_hits_total",
            "device_busy_fraction",
            "time_to_first_token_seconds_bucket",
        ),
        *(
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "worker_restarts_total",
            "request_failure_total",
            "gateway_cpu_share",
            "pool_load",
        ),
    ):
        assert name in shown
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_prometheus_reads_the_rules_and_the_job_that_they_ask_for() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "specserve"
    assert all((ROOT / "deploy" / name).is_file() for name in config["rule_files"])
    assert any('up{job="specserve"}' in rule["expr"] for rule in RULES)
