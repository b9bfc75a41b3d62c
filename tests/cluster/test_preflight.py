"""Refusals of what cannot be served on this machine, before Ray starts and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from specserve.cluster import preflight
from specserve.cluster.preflight import (
    require_disk_for_ray,
    require_possible_here,
    require_serve,
)
from specserve.config.tree import config_from_keys
from specserve.errors import SpecserveError, Unavailable
from tests.support import checkpoints, gguf_files


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.cluster.preflight._num_gpus", lambda: 0)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target.path": "./nope"}, "target.path ./nope does not exist; give a directory"),
        ({"draft.path": "/nope"}, "draft.path /nope does not exist"),
        (
            {"draft.kind": "max_gram", "draft.path": "/nope"},
            "draft.path /nope does not exist; give what `specserve tables`",
        ),
        ({"target.tensor_parallel": 3}, "8 attention heads cannot be shared evenly by 3 ranks"),
        ({"target.device": "cuda"}, "needs 1 GPU (target-0 1), the cluster has 0"),
        ({"http.api_keys_file": "/nope"}, "http.api_keys_file /nope: it cannot be read"),
        ({"demo.size": "60B"}, "demo.size 60,000,000,000 takes 111.8 GiB of memory"),
        ({"cache.pages": 99_999_999}, "cache.pages 99,999,999 take 3051.8 GiB of memory or more"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_key(
    keys: Mapping[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.cluster.preflight.available_memory", lambda: 2**34)
    with pytest.raises(SpecserveError) as refused:
        require_possible_here(config_from_keys(keys))
    assert str(refused.value).startswith(message)


@pytest.mark.usefixtures("no_gpus")
def test_sampling_that_cannot_be_recommended_is_refused(tmp_path: Path) -> None:
    target = checkpoints.make("llama", tmp_path / "target")
    (target / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(SpecserveError, match="temperature must be a number"):
        require_possible_here(config_from_keys({"target.path": str(target)}))


@pytest.mark.usefixtures("no_gpus")
def test_gguf_files_are_refused_by_what_their_headers_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original = checkpoints.make("llama", tmp_path / "original")
    file = gguf_files.write(original, tmp_path / "tiny.gguf")
    keys: Mapping[str, object] = {"target.path": str(file), "target.tensor_parallel": 3}
    with pytest.raises(SpecserveError, match=r"^4 attention heads cannot be shared evenly by 3"):
        require_possible_here(config_from_keys(keys))
    (cut := tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-100])
    for keys in ({"target.path": str(cut)}, {"target.path": str(file), "draft.path": str(cut)}):
        with pytest.raises(SpecserveError, match=f"^{cut} cannot be read as GGUF"):
            require_possible_here(config_from_keys(keys))


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"target.path": "owner/model", "draft.path": "owner/draft"},
        {"target.tensor_parallel": 4, "cache.pages": 4096, "demo.size": "200M"},
        {"target.device": "cuda", "target.label_selector": {"disk": "models"}},
    ],
)
def test_what_may_be_served_passes(keys: Mapping[str, object]) -> None:
    require_possible_here(config_from_keys(keys))


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("text", ["no JSON", "[]", json.dumps({"num_attention_heads": "many"})])
def test_a_config_that_is_not_understood_is_left_to_the_full_check(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    keys = {"target.path": str(tmp_path), "target.tensor_parallel": 3, "cache.pages": 99_999_999}
    require_possible_here(config_from_keys(keys))


def test_a_full_disk_is_named_with_what_ray_keeps_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = {tmp_path}

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=2**20 if path in full else 2**40)

    monkeypatch.setattr(preflight, "shutil", SimpleNamespace(disk_usage=usage))
    monkeypatch.setattr(preflight, "SHORT_TMP", "/")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "rays"))
    said = rf"{tmp_path}/rays/ray has 1 MiB free for Ray's sessions and logs; .* RAY_TMPDIR"
    with pytest.raises(Unavailable, match=said):
        require_possible_here(config_from_keys({}))
    full.clear()
    require_disk_for_ray()
    full.add(Path("/"))
    with pytest.raises(Unavailable, match=r"^/ has 1 MiB free for the sockets"):
        require_disk_for_ray()


def test_a_grpcio_that_is_too_old_for_serve_is_named_with_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Import the generated code, which compares versions, beside an older grpcio."""
    require_serve()
    package = "grpc_reflection.v1alpha"
    for module in ("reflection", "reflection_pb2_grpc"):
        monkeypatch.delitem(sys.modules, f"{package}.{module}")
        monkeypatch.delattr(f"{package}.{module}")
    monkeypatch.setattr("grpc.__version__", "1.60.2")
    with pytest.raises(Unavailable, match=r"; pip install 'grpcio>=[\d.]+\d'$"):
        require_serve()


def test_it_needs_no_torch() -> None:
    code = "import sys, specserve.cluster.preflight; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
