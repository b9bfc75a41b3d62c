"""The bill of materials: every locked package, with what CycloneDX demands of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import specserve
from deploy.locks.lock_file import FLASHINFER, NVCC, RUNTIME, TORCH_CPU, TORCH_CUDA, read_lock
from deploy.locks.sbom import bill_of_materials

HASH = {
    "type": "object",
    "required": ["alg", "content"],
    "additionalProperties": False,
    "properties": {"alg": {"const": "SHA-256"}, "content": {"pattern": "^[0-9a-f]{64}$"}},
}
LICENCES = {
    "type": "array",
    "oneOf": [
        {
            "maxItems": 1,
            "minItems": 1,
            "items": {
                "required": ["expression"],
                "additionalProperties": False,
                "properties": {"expression": {"type": "string", "minLength": 1}},
            },
        },
        {
            "items": {
                "required": ["license"],
                "additionalProperties": False,
                "properties": {
                    "license": {
                        "required": ["name"],
                        "properties": {"name": {"type": "string", "minLength": 1}},
                    }
                },
            }
        },
    ],
}
COMPONENT = {
    "type": "object",
    "required": ["type", "bom-ref", "name", "version", "purl", "hashes"],
    "properties": {
        "type": {"enum": ["application", "library"]},
        "scope": {"enum": ["required", "optional", "excluded"]},
        "purl": {"pattern": r"^pkg:pypi/[a-z0-9-]+@\S+$"},
        "hashes": {"type": "array", "items": HASH, "uniqueItems": True},
        "licenses": LICENCES,
    },
}
# What of the schema of CycloneDX 1.6 is used here; the whole one was tried by hand.
SCHEMA = {
    "type": "object",
    "required": [
        "bomFormat",
        "specVersion",
        "serialNumber",
        "version",
        "metadata",
        "components",
        "dependencies",
    ],
    "additionalProperties": False,
    "properties": {
        "bomFormat": {"const": "CycloneDX"},
        "specVersion": {"const": "1.6"},
        "serialNumber": {"pattern": "^urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"},
        "version": {"const": 1},
        "metadata": {
            "required": ["timestamp", "component"],
            "properties": {"component": COMPONENT, "timestamp": {"pattern": r"^\d{4}-.+\+00:00$"}},
        },
        "components": {"type": "array", "items": COMPONENT, "uniqueItems": True},
        "dependencies": {
            "type": "array",
            "items": {
                "required": ["ref", "dependsOn"],
                "properties": {"dependsOn": {"type": "array", "uniqueItems": True}},
            },
        },
    },
}


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    return bill_of_materials()


@pytest.fixture(scope="module")
def components(bill: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {component["name"]: component for component in bill["components"]}


def test_it_has_the_fields_of_cyclonedx(bill: dict[str, Any]) -> None:
    jsonschema.validate(bill, SCHEMA)
    refs = [each["bom-ref"] for each in (*bill["components"], bill["metadata"]["component"])]
    assert len(refs) == len(set(refs))
    named = [ref for each in bill["dependencies"] for ref in (each["ref"], *each["dependsOn"])]
    assert set(named) <= set(refs)


def test_it_lists_each_locked_package_with_its_hashes(components: dict[str, Any]) -> None:
    files = (RUNTIME, TORCH_CPU, TORCH_CUDA, FLASHINFER, NVCC)
    locked = [each for file in files for each in read_lock(file)]
    assert set(components) == {package.name for package in locked}
    for package in locked:
        component = components[package.name]
        assert component["version"] == package.version
        assert set(package.hashes) <= {each["content"] for each in component["hashes"]}


def test_the_compiler_that_images_leave_behind_is_no_part_of_a_server(
    components: dict[str, Any],
) -> None:
    scopes = {name: components[name]["scope"] for name in ("nvidia-cuda-nvcc", "flashinfer-python")}
    assert scopes == {"nvidia-cuda-nvcc": "excluded", "flashinfer-python": "optional"}


def test_every_package_that_a_cpu_needs_has_a_licence(components: dict[str, Any]) -> None:
    required = [each for each in components.values() if each["scope"] == "required"]
    assert [each["name"] for each in required if not each.get("licenses")] == []


def test_it_says_who_needs_whom(bill: dict[str, Any], components: dict[str, Any]) -> None:
    needs = {each["ref"]: set(each["dependsOn"]) for each in bill["dependencies"]}
    ours = bill["metadata"]["component"]["bom-ref"]
    assert components["torch"]["bom-ref"] in needs[ours]
    # uvicorn is of an extra of Ray's.
    assert components["uvicorn"]["bom-ref"] in needs[components["ray"]["bom-ref"]]
    required = {each["bom-ref"] for each in components.values() if each["scope"] == "required"}
    assert required <= set(needs)


def test_it_has_the_hash_of_what_was_built(tmp_path: Path) -> None:
    wheel = tmp_path / f"specserve-{specserve.__version__}-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    hashes = bill_of_materials([wheel])["metadata"]["component"]["hashes"]
    assert hashes == [{"alg": "SHA-256", "content": hashlib.sha256(b"wheel").hexdigest()}]


def test_a_build_of_one_date_gives_one_bill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    assert bill_of_materials() == bill_of_materials()
    assert bill_of_materials()["metadata"]["timestamp"] == "2026-01-01T00:00:00+00:00"
