"""Write a bill of materials (SBOM, CycloneDX 1.6 in JSON) of what a server is made of.

`make dist` runs it. Names, versions and hashes are those of the locks; licences and who needs whom
 are those of the packages that are installed here. Needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import specserve
from deploy.locks.closure import closure, runtime_requirements
from deploy.locks.lock_file import (
    FLASHINFER,
    NVCC,
    ROOT,
    RUNTIME,
    TORCH_CPU,
    TORCH_CUDA,
    LockedPackage,
    canonical,
    read_lock,
)

SPEC_VERSION = "1.6"
LONGEST_NAME = 80
"""Letters of a licence's name; some packages have the whole text in its place."""


def locked_packages() -> Iterator[tuple[LockedPackage, str]]:
    """Yield each locked package with its scope; CUDA's libraries are not needed on CPUs."""
    for package in read_lock(RUNTIME):
        yield package, "required"
    torch, *cuda = read_lock(TORCH_CUDA)
    (cpu,) = read_lock(TORCH_CPU)
    both = tuple(sorted({*torch.hashes, *cpu.hashes}))
    yield LockedPackage(torch.name, torch.version, both), "required"
    for package in (*cuda, *read_lock(FLASHINFER)):
        yield package, "optional"
    for package in read_lock(NVCC):
        yield package, "excluded"  # compiles, and is in no image


def bill_of_materials(built: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the bill of materials; `built` are the wheel and the sdist, whose hashes it has."""
    locked = list(locked_packages())
    refs = {package.name: _ref(package.name, package.version) for package, _ in locked}
    own = _specserve(built)
    needs = closure(runtime_requirements())
    direct = {canonical(Requirement(each).name) for each in runtime_requirements()}
    tree: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {"timestamp": _timestamp(), "component": own},
        "components": [_component(package, scope) for package, scope in locked],
        "dependencies": [
            _dependency(own["bom-ref"], direct, refs),
            *(_dependency(ref, needs[name], refs) for name, ref in refs.items() if name in needs),
        ],
    }
    content = json.dumps(tree, sort_keys=True)
    return {**tree, "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, content).urn}


def _specserve(built: Iterable[Path]) -> dict[str, Any]:
    return {
        "type": "application",
        "bom-ref": _ref("specserve", specserve.__version__),
        "name": "specserve",
        "version": specserve.__version__,
        "purl": _ref("specserve", specserve.__version__),
        "licenses": [{"expression": "Apache-2.0"}],
        "hashes": [_sha256(hashlib.sha256(file.read_bytes()).hexdigest()) for file in built],
    }


def _component(package: LockedPackage, scope: str) -> dict[str, Any]:
    """Describe a package. Its hashes are those of the files of which one is installed."""
    found = _installed(package)
    return {
        "type": "library",
        "bom-ref": _ref(package.name, package.version),
        "name": package.name,
        "version": package.version,
        "scope": scope,
        "purl": _ref(package.name, package.version),
        **({} if found is None else {"licenses": _licences(found)}),
        "hashes": [_sha256(each) for each in package.hashes],
    }


def _dependency(ref: str, needed: Iterable[str], refs: Mapping[str, str]) -> dict[str, Any]:
    return {"ref": ref, "dependsOn": sorted(refs[name] for name in needed if name in refs)}


def _sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}


def _ref(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _installed(package: LockedPackage) -> metadata.Distribution | None:
    """Return the installed package, if it is installed in the version of the lock.

    torch's own version names its build, as in 2.13.0+cpu.
    """
    try:
        found = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return None
    return found if found.version.partition("+")[0] == package.version else None


def _licences(found: metadata.Distribution) -> list[dict[str, Any]]:
    """Return what a package says of its licence: an SPDX expression, or else names."""
    stated = found.metadata.json
    if "license_expression" in stated:
        return [{"expression": stated["license_expression"]}]
    names = [
        line.rpartition(" :: ")[2]
        for line in stated.get("classifier", ())
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    first_line = str(stated.get("license", "")).strip().partition("\n")[0]
    if not names and first_line:
        names = [first_line[:LONGEST_NAME]]
    return [{"license": {"name": name}} for name in names]


def _timestamp() -> str:
    """Return the time of the build: SOURCE_DATE_EPOCH where the build is to be reproducible."""
    stated = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.now(UTC) if stated is None else datetime.fromtimestamp(int(stated), UTC)
    return now.isoformat(timespec="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of wheel and sdist")
    out: Path = parser.parse_args().out
    out.mkdir(exist_ok=True)
    name = f"specserve-{specserve.__version__}"
    tree = bill_of_materials([*sorted(out.glob(f"{name}*.whl")), *out.glob(f"{name}.tar.gz")])
    file = out / f"{name}.cdx.json"
    file.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    unknown = sum(not component.get("licenses") for component in tree["components"])
    print(f"{file}: {len(tree['components'])} packages, {unknown} without a known licence")


if __name__ == "__main__":
    main()
