"""The wheel that is copied to a machine with a GPU: kernels in the place of their sources."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.gpu.flashinfer_wheel import pack

INFO = "flashinfer_python-1.0.dist-info"
FILES = {
    "flashinfer/__init__.py": "",
    "flashinfer/data/csrc/prefill.jinja": "a template",
    "flashinfer/data/csrc/fused_moe/moe.cu": "a source",
    "flashinfer/data/cutlass/include/cutlass.h": "a header",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def test_pip_installs_the_wheel_with_kernels_and_templates_and_no_sources(tmp_path: Path) -> None:
    wheel = tmp_path / "whole/flashinfer_python-1.0-py3-none-any.whl"
    kernels, out, site = tmp_path / "kernels", tmp_path / "out", tmp_path / "site"
    for folder in (wheel.parent, kernels / "sampling", out):
        folder.mkdir(parents=True)
    (kernels / "specserve.json").write_text("{}")
    (kernels / "sampling/sampling.so").write_text("compiled")
    with zipfile.ZipFile(wheel, "w") as written:
        for name, text in FILES.items():
            written.writestr(name, text)
        written.writestr(f"{INFO}/RECORD", "\n".join(f"{name},," for name in FILES))
    packed = pack(wheel, kernels, out)
    command = f"-m pip install -q --no-index --no-deps --no-compile --target {site} {packed}"
    subprocess.run([sys.executable, *command.split()], check=True)
    installed = {str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()}
    assert {name for name in installed if not name.startswith(INFO)} == {
        "flashinfer/__init__.py",
        "flashinfer/data/csrc/prefill.jinja",
        "flashinfer/data/aot/specserve.json",
        "flashinfer/data/aot/sampling/sampling.so",
    }
