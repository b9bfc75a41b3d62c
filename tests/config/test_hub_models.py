"""Models of the hub that a config names without a commit, and the warnings about them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from rich.console import Console

from specserve.cli import serve as serve_command
from specserve.cluster import app
from specserve.config.hub_models import unpinned_models
from specserve.config.tree import config_from_keys
from specserve.errors import ModelNotFound
from specserve.llm.inprocess import open_parts
from specserve.tools.doctor import models
from specserve.tools.doctor.findings import Grade

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_PAIR = {"target.path": "someone/large", "draft.path": "someone/small"}


def sections(keys: dict[str, object]) -> list[str]:
    return [model.section for model in unpinned_models(config_from_keys(keys))]


def test_hub_names_without_a_commit_are_named_by_their_key() -> None:
    first, second = unpinned_models(config_from_keys({**HUB_PAIR, "draft.revision": "main"}))
    assert "target.path someone/large is a hub name without target.revision" in str(first)
    assert "draft.revision main of someone/small is no commit" in str(second)
    assert "set draft.revision to the 40 digits of the commit" in str(second)


def test_hub_names_with_a_commit_are_pinned() -> None:
    assert not sections({**HUB_PAIR, "target.revision": COMMIT, "draft.revision": COMMIT})


@pytest.mark.parametrize("path", ["{}/model", "{}/no-such-model", "./model", "~/model", "a/b/c"])
def test_paths_are_not_hub_names(path: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert not sections({"target.path": path.format(tmp_path)})


def test_the_demo_pair_and_drafts_without_a_model_are_pinned(tmp_path: Path) -> None:
    assert not sections({})
    assert not sections({"draft.kind": "prompt_copy"})
    assert not sections({"draft.kind": "unigram", "draft.path": "some/tables"})


# Where it is said


def test_serve_says_it_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fetched(Exception):
        pass

    def fetch(config: object) -> None:
        raise Fetched

    said: list[str] = []
    monkeypatch.setattr(serve_command, "checkpoint_check", fetch)
    with pytest.raises(Fetched):
        serve_command.serve_until_ended(config_from_keys(HUB_PAIR), said.append, Console())
    assert [line.split()[1] for line in said] == ["target.path", "draft.path"]
    assert all(line.startswith("warning: ") for line in said)


def test_an_application_for_rays_own_tools_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        app.build(HUB_PAIR)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "target.path",
        "draft.path",
    ]


def test_llm_logs_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def offline(name: str, **options: object) -> None:
        raise OSError("offline")

    monkeypatch.setattr("specserve.models.checkpoints.find.snapshot_download", offline)
    with caplog.at_level(logging.WARNING), pytest.raises(ModelNotFound):
        open_parts(config_from_keys({**HUB_PAIR, "draft.revision": COMMIT}))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["target.path"]


def test_the_doctor_warns_of_it() -> None:
    findings = list(models.revisions(config_from_keys(HUB_PAIR)))
    assert [finding.subject for finding in findings] == ["target, revision", "draft, revision"]
    assert all(finding.grade is Grade.WARN for finding in findings)
    assert "draft.revision" in findings[1].remedy


def test_the_draft_is_fetched_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[str, object]] = []

    def snapshot_download(name: str, *, revision: object, allow_patterns: object) -> str:
        fetched.append((name, revision))
        raise OSError("offline")

    monkeypatch.setattr("specserve.models.checkpoints.find.snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match=COMMIT):
        open_parts(config_from_keys({"draft.path": "someone/small", "draft.revision": COMMIT}))
    assert fetched == [("someone/small", COMMIT)]
