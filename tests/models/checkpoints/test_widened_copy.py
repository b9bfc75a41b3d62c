from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specserve.config.tree import DEMO, config_from_keys
from specserve.errors import ModelError
from specserve.models.checkpoints import widened_copy as module
from specserve.models.checkpoints.weights import num_stored_parameters
from specserve.models.checkpoints.widen import inflate
from specserve.models.checkpoints.widened_copy import target_checkpoint, widened_copy

SIZE = 10_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specserve"


def test_a_copy_is_written_once_and_has_the_size(cache: Path) -> None:
    copy = widened_copy(DEMO / "target", SIZE)
    assert copy.parent == cache
    assert abs(num_stored_parameters(copy) - SIZE) < 0.1 * SIZE
    written = (copy / "model.safetensors").stat().st_mtime_ns
    assert widened_copy(DEMO / "target", SIZE) == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == written


def test_processes_that_want_it_together_write_it_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []

    def counted(*arguments: object) -> int:
        writes.append(arguments)
        return inflate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "inflate", counted)
    with ThreadPoolExecutor(4) as threads:
        copies = list(threads.map(lambda _: widened_copy(DEMO / "target", SIZE), range(4)))
    assert len(set(copies)) == len(writes) == 1
    assert not list(cache.glob(".unfinished*"))


def test_a_copy_that_fails_leaves_nothing_behind(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(checkpoint: Path, parameters: int, out: Path, report: object) -> int:
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "inflate", full)
    with pytest.raises(ModelError, match=r"No space left.*demo.size to none"):
        widened_copy(DEMO / "target", SIZE)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_removed_by_the_next(cache: Path) -> None:
    copy = widened_copy(DEMO / "target", SIZE)
    left = copy.rename(cache / f".unfinished-{copy.name}")
    (left / "half-written").touch()
    assert widened_copy(DEMO / "target", SIZE) == copy
    assert not (copy / "half-written").exists()
    assert not left.exists()


def test_a_disk_without_room_is_named_before_anything_is_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(ModelError, match=r"it takes 0.2 GiB, and 0.0 GiB are free"):
        widened_copy(DEMO / "target", 100_000_000)
    assert not list(cache.iterdir())


def test_the_target_of_a_config_is_widened_as_it_says() -> None:
    assert target_checkpoint(config_from_keys({})) == DEMO / "target"
    widened = target_checkpoint(config_from_keys({"demo.size": "10M"}))
    config = json.loads((widened / "config.json").read_text())
    assert config["intermediate_size"] > 640
