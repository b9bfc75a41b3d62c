"""Install what benchmarks compare with, each into an environment of its own.

`python -m lab.bench.peers.install [NAME ...]`; an environment that is up to date is left as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.bench.peers.process import ROOT
from specserve.host import usable_cores

FOLDER = Path(__file__).parent
VLLM_REQUIREMENTS = FOLDER / "requirements-vllm.txt"
MEDIA = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's media packages, which do not fit its torch."""
LLAMA_BUILD = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    " -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
)


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """An environment: what is installed into it, and what is removed afterwards."""

    name: str
    requirements: Path
    also: tuple[str, ...] = ()
    """Arguments of a second `pip install`."""
    removed: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @property
    def is_current(self) -> bool:
        """Return whether it was installed after the last change of its requirements."""
        stamp = self.folder / "installed"
        files = (self.requirements, *((ROOT / "pyproject.toml",) if self.also else ()))
        return stamp.exists() and all(
            file.stat().st_mtime <= stamp.stat().st_mtime for file in files
        )

    def install(self) -> None:
        """Install, and keep pip's output in install.log. Raises CalledProcessError."""
        _run([sys.executable, "-m", "venv", str(self.folder)])
        stamp, pip = self.folder / "installed", [str(self.folder / "bin/python"), "-m", "pip"]
        stamp.unlink(missing_ok=True)
        for words in (("-r", str(self.requirements)), self.also):
            if words:
                _run([*pip, "install", "--log", str(self.folder / "install.log"), *words])
        if self.removed:
            _run([*pip, "uninstall", "--yes", *self.removed])
        stamp.touch()


PEERS = {
    # The converter depends on torchvision but works without it; its build may not fit the torch.
    "openvino": PeerEnvironment(
        ".venv-peers", FOLDER / "requirements.txt", removed=("torchvision",)
    ),
    "vllm": PeerEnvironment(".venv-vllm", VLLM_REQUIREMENTS, removed=MEDIA),
    # Compiled for this processor.
    "llama.cpp": PeerEnvironment(".venv-llama", FOLDER / "requirements-llama.txt"),
    # Ray Serve LLM cannot be imported without vLLM, whose range of llguidance is older than ours.
    "ray-llm": PeerEnvironment(
        ".venv-ray-llm",
        VLLM_REQUIREMENTS,
        ("-e", f"{ROOT}[cpu,ray-llm]", "openai", "psutil", "pytest", "pytest-timeout"),
        MEDIA,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of {', '.join(PEERS)}")
    names = parser.parse_args(arguments).names or list(PEERS)
    if unknown := set(names) - set(PEERS):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(PEERS)}")
    failed = []
    for name in names:
        if PEERS[name].is_current:
            continue
        try:
            PEERS[name].install()
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: {error}; see {PEERS[name].folder / 'install.log'}", file=sys.stderr)
    return 1 if failed else 0


def _run(command: Sequence[str]) -> None:
    build = {"CMAKE_ARGS": LLAMA_BUILD, "LLAMA_CPP_BUILD_JOBS": str(usable_cores())}
    subprocess.run(command, check=True, env=os.environ | build)


if __name__ == "__main__":
    sys.exit(main())
