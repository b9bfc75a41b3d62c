"""Compare manifests with the full definitions of KubeRay and Kubernetes; unknown fields are errors.

    python -m tests.support.kubernetes_check --kuberay CRDS --kubernetes SWAGGER deploy/kuberay.yaml

CRDS is the folder `helm-chart/kuberay-operator/crds` of KubeRay, SWAGGER the file
`api/openapi-spec/swagger.json` of Kubernetes, each of the version that your cluster has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Definitions = Mapping[tuple[str, str], Mapping[str, Any]]


def strict(schema: Any) -> Any:
    """Return a definition as a JSON schema in which objects have no fields but the known ones.

    Kubernetes' own words are translated: a number or a text, and anything at all.
    """
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    if str(schema.get("$ref", "")).endswith("resource.Quantity"):
        return {"type": ["integer", "string"]}
    translated = {
        key: {name: strict(part) for name, part in value.items()}
        if key == "properties"
        else strict(value)
        for key, value in schema.items()
        if key not in ("default", "description", "example", "format")
    }
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and not is_open:
        translated["additionalProperties"] = False
    return translated


def kuberay_definitions(folder: Path) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    for file in sorted(folder.glob("*.yaml")):
        definition = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]
        for version in definition["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            api = f"{definition['group']}/{version['name']}"
            yield (api, definition["names"]["kind"]), schema


def kubernetes_definitions(file: Path) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    parts = json.loads(file.read_text(encoding="utf-8"))["definitions"]
    shared = {name: strict(part) for name, part in parts.items()}
    for name, part in parts.items():
        for served in part.get("x-kubernetes-group-version-kind", ()):
            api = "/".join(filter(None, (served["group"], served["version"])))
            yield (api, served["kind"]), {"$ref": f"#/definitions/{name}", "definitions": shared}


def errors(tree: Mapping[str, Any], definitions: Definitions) -> list[str]:
    """Return what is wrong with an object, one line each."""
    key = (str(tree.get("apiVersion")), str(tree.get("kind")))
    if key not in definitions:
        return [f"{' '.join(key)} is not defined"]
    validator = jsonschema.Draft7Validator(definitions[key])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tree)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kuberay", type=Path, required=True, metavar="CRDS")
    parser.add_argument("--kubernetes", type=Path, required=True, metavar="SWAGGER")
    parser.add_argument("manifests", type=Path, nargs="+")
    options = parser.parse_args()
    definitions = dict(kubernetes_definitions(options.kubernetes))
    definitions |= dict(kuberay_definitions(options.kuberay))
    failed = False
    for file in options.manifests:
        for tree in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            found = errors(tree, definitions)
            failed |= bool(found)
            name = f"{file}: {tree['kind']} {tree['metadata']['name']}"
            print("\n  ".join([f"{name}: {'refused' if found else 'ok'}", *found]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
