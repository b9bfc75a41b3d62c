"""Commands of other programs on the pages: their options, files, secrets and extras exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import click
import pytest
import yaml

from specserve.cli.arguments import build_parser
from tests.support import pages
from tests.support.pages import ROOT, Command

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning"
)  # of ray.serve's own, once imported

IMAGE = "specserve"
REQUIREMENT = re.compile(r"(?:specserve|\.)\[([\w,-]+)\]")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def check_ray(command: Command) -> None:
    from ray.scripts.scripts import cli

    _parse(cli, *command.words[1:])


def check_serve(command: Command) -> None:
    from ray.serve.scripts import cli

    _parse(cli, *command.words[1:])


def _parse(group: click.Group, name: str, *arguments: str) -> None:
    """Raise click.UsageError or KeyError for what the program would not take."""
    group.commands[name].make_context(name, list(arguments))


def check_docker(command: Command) -> None:
    """Check what follows the image, which is for specserve."""
    if command.words[1] == "run" and (arguments := command.words[command.words.index(IMAGE) + 1 :]):
        build_parser().parse_args(arguments)


def check_pip(command: Command) -> None:
    for word in command.words:
        if named := REQUIREMENT.fullmatch(word):
            assert set(named[1].split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])
    for option, file in pairwise(command.words):
        if option in ("-c", "-r"):
            assert (ROOT / file).is_file(), file


def check_kubectl(command: Command) -> None:
    for option, file in pairwise(command.words):
        if option == "-f":
            assert list(yaml.safe_load_all((ROOT / file).read_text(encoding="utf-8")))


CHECKS: Mapping[str, Callable[[Command], None]] = {
    "ray": check_ray,
    "serve": check_serve,
    "docker": check_docker,
    "pip": check_pip,
    "uv": check_pip,
    "kubectl": check_kubectl,
}
COMMANDS = [
    pytest.param(command, id=f"{block.name}-{' '.join(command.words[:3])}")
    for block in pages.blocks()
    if block.language == "sh"
    for command in pages.commands(block.text)
    if command.program in CHECKS
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_program_takes_the_command(command: Command) -> None:
    CHECKS[command.program](command)


@pytest.mark.parametrize(
    "line",
    [
        "ray start --heads",
        "serve deploys deploy/demo.yaml",
        "docker run specserve serve --ports 1",
        "pip install 'specserve[gpus]'",
        "pip install -c constraint.txt .",
        "kubectl apply -f deploy/kubrays.yaml",
    ],
)
def test_a_command_that_the_program_would_not_take_is_noticed(line: str) -> None:
    (command,) = pages.commands(line)
    with pytest.raises(Exception):  # noqa: B017, PT011 - each program has its own
        CHECKS[command.program](command)


def _secrets_used(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield name and key of every secret that an object refers to."""
    if isinstance(tree, list):
        for one in tree:
            yield from _secrets_used(one)
    elif isinstance(tree, dict):
        if "key" in (named := tree.get("secretKeyRef", {})):
            yield named["name"], named["key"]
        if "items" in (source := tree.get("secret") or {}):
            yield from ((source["name"], item["key"]) for item in source["items"])
        for one in tree.values():
            yield from _secrets_used(one)


def test_the_page_of_kubernetes_makes_the_secrets_that_its_files_refer_to() -> None:
    page = ROOT / "docs/guides/kubernetes.md"
    (block,) = (
        one
        for one in pages.blocks_of(page, page.read_text(encoding="utf-8"))
        if "create secret" in one.text
    )
    made = set(
        re.findall(r"secret generic (\S+) --from-(?:literal|file)=(\w+)=", block.text),
    )
    used = {
        secret
        for file in ("deploy/kuberay.yaml", "deploy/kubernetes/redis.yaml")
        for tree in yaml.safe_load_all((ROOT / file).read_text(encoding="utf-8"))
        for secret in _secrets_used(tree)
    }
    assert used == made
