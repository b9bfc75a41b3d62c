"""The keys of adapters that are refused when a config is parsed, or before Ray starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve.cluster.preflight import require_possible_here
from specserve.config.tree import DEMO, config_from_keys
from specserve.errors import AdapterError, ConfigError
from specserve.tools.doctor import models
from specserve.tools.doctor.findings import Grade, guarded
from tests.support.adapters import CONFIG_FILE, WEIGHTS_FILE, write_adapter


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adapters.paths": {"a:b": "/adapters/a"}}, "names the adapter 'a:b'; a name begins"),
        ({"adapters.load_from": "/adapters", "replicas.gateways": 2}, "gateways is 2; set it to 1"),
    ],
)
def test_names_and_gateways_that_adapters_cannot_have_are_refused(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys(keys)


def test_an_adapter_that_cannot_be_read_is_refused_by_its_name_before_ray_starts(
    tmp_path: Path,
) -> None:
    def refusal() -> str:
        with pytest.raises(AdapterError) as refused:
            require_possible_here(config_from_keys({"adapters.paths": {"sql": str(tmp_path)}}))
        return str(refused.value)

    begin = f"adapters.paths.sql: {tmp_path}"
    assert refusal() == f"{begin}/{CONFIG_FILE} cannot be read: No such file or directory"
    (tmp_path / CONFIG_FILE).write_text('{"peft_type": "LORA"}', encoding="utf-8")
    assert refusal().startswith(f"{begin} has no {WEIGHTS_FILE}")
    (tmp_path / WEIGHTS_FILE).write_bytes(b"cut off")
    assert refusal().startswith(f"{begin}/{WEIGHTS_FILE} cannot be read as safetensors")


def test_the_doctor_reads_adapters_and_compares_them_with_the_target(tmp_path: Path) -> None:
    write_adapter(DEMO / "target", tmp_path / "sql")
    paths = {"sql": str(tmp_path / "sql")}
    config = config_from_keys({"adapters.paths": paths})
    require_possible_here(config)

    def finding() -> tuple[Grade, str]:
        (found,) = guarded("adapters", lambda: models.adapters(config))
        return found.grade, found.found

    assert finding() == (Grade.OK, f"sql: {paths['sql']}")
    (tmp_path / "sql" / WEIGHTS_FILE).unlink()
    assert finding()[0] is Grade.BAD
    assert finding()[1].startswith(f"{paths['sql']} has no {WEIGHTS_FILE}")
