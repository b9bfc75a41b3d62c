"""Try the wheel from an empty folder: build, install, examine, serve and send a request.

With `--borrow`, `python -m tests.support.wheel` uses the dependencies of the environment that runs
it and needs no network; without, it installs its own, and the seconds that are printed are a fresh
machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.ray_server import free_port

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".*cache", ".git", ".hypothesis", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "site"
)
BUILD = (
    "import sys; from setuptools import build_meta; "
    "print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
)
READY_S = 300.0


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


def build(into: Path) -> Built:
    """Build the sdist from a copy of the tree and the wheel from the sdist, without network."""
    shutil.copytree(ROOT, into / "tree", ignore=LEFT_OUT)
    return build_tree(into / "tree", into)


def build_tree(tree: Path, into: Path) -> Built:
    """Build the sdist of a tree, which may leave files in it, and the wheel from the sdist."""
    sdist = _build("build_sdist", tree, into)
    with tarfile.open(sdist) as archive:
        archive.extractall(into / "unpacked", filter="data")
    (source,) = (into / "unpacked").iterdir()
    return Built(sdist, _build("build_wheel", source, into))


def build_editable(into: Path) -> Path:
    """Build what `pip install -e` installs, from a copy of the tree at `into / "specserve"`."""
    clone = into / "specserve"
    shutil.copytree(ROOT, clone, ignore=LEFT_OUT)
    return _build("build_editable", clone, into)


def _build(target: str, source: Path, into: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, target, str(into)],
        cwd=source,
        env=clean(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


def environment(where: Path, wheel: Path, *, borrow: bool) -> Path:
    """Make an environment and return its `bin`.

    Borrowed packages come after its own, so that it runs the specserve of the wheel.
    """
    venv.create(where, with_pip=not borrow)
    if borrow:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(where / "bin" / "python"),
            "install",
            "--no-index",
            "--no-deps",
            "--quiet",
        ]
        run([*pip, str(wheel)], cwd=where)
        (site,) = where.glob("lib/python*/site-packages")
        borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    else:
        run(
            [
                str(where / "bin" / "pip"),
                "install",
                "--quiet",
                "-c",
                str(ROOT / "constraints.txt"),
                str(wheel),
            ],
            cwd=where,
        )
    return where / "bin"


def clean() -> Mapping[str, str]:
    """Return an environment without variables that point to the repository."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }


def run(command: list[str], *, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=clean(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def served(bin: Path, folder: Path) -> Iterator[str]:
    """Serve and yield the URL once it is ready."""
    command = [
        str(bin / "specserve"),
        "serve",
        "--port",
        str(free_port()),
        "--set",
        "target.threads=1",
        "--set",
        "draft.threads=1",
    ]
    process = subprocess.Popen(command, cwd=folder, env=clean(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        begun = time.monotonic()
        for line in process.stdout:
            if line.startswith("ready "):
                yield line.split()[1]
                break
            assert time.monotonic() - begun < READY_S
        else:
            raise AssertionError("it ended before it was ready")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


def ask(url: str) -> str:
    body = json.dumps(
        {"model": "demo", "prompt": "import os", "max_tokens": 32, "temperature": 0}
    ).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    assert text.strip()
    return text


@contextmanager
def timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"{what:<28}{time.monotonic() - begun:7.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--borrow",
        action="store_true",
        help="the dependencies that are here, instead of the network's",
    )
    parser.add_argument("--wheel", type=Path, help="an existing one, instead of building one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root, wheel = Path(name), options.wheel
        if wheel is None:
            with timed("build sdist and wheel"):
                wheel = build(root).wheel
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
        with timed("install"):
            bin = environment(root / "fresh", wheel.resolve(), borrow=options.borrow)
        folder = root / "empty"
        folder.mkdir()
        with timed("specserve doctor"):
            run([str(bin / "specserve"), "doctor", "--set", f"http.port={free_port()}"], cwd=folder)
        with timed("specserve generate"):
            run(
                [str(bin / "specserve"), "generate", "--prompt", "import os", "--temperature", "0"],
                cwd=folder,
            )
        begun = time.monotonic()
        with served(bin, folder) as url:
            print(
                f"{'specserve serve until ready':<28}{time.monotonic() - begun:7.1f} s", flush=True
            )
            with timed("the first request"):
                ask(url)
            with timed("the second request"):
                ask(url)
            begun = time.monotonic()
        print(f"{'Ctrl-C until all is gone':<28}{time.monotonic() - begun:7.1f} s", flush=True)
        assert not list(folder.iterdir()), "what is served leaves nothing in the folder"


if __name__ == "__main__":
    main()
