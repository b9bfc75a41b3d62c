"""The pages run and name only what exists.

A block runs unless the comment above it says `not run: why`: in `test_blocks.py`, or, if it asks a
server, in `tests/ray/test_pages.py`, with one server for all. What starts a server is parsed and
not started (other tests start one): of `specserve serve` the config is read.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from docs._build.commands import commands
from docs._build.configuration import all_keys
from specserve.cli import arguments, config_options
from specserve.cli import main as cli
from specserve.config.features import part
from specserve.config.tree import config_from_keys, parse_override
from tests.support import pages as guide
from tests.support.llm_configs import llm_config
from tests.support.pages import DOCS, ROOT, Block, Command

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning"
)  # of ray.serve's own, once imported

BLOCKS = guide.blocks()
LANGUAGES = ("sh", "console", "python", "yaml", "json", "math", "")
RUN = guide.programs(
    [
        block
        for block in BLOCKS
        if block.language in ("sh", "console", "python") and block.excuse is None
    ]
)
SHELL = [block for block in BLOCKS if block.language in ("sh", "console")]
OTHERS = {
    "--version",
    "--build-arg",
    "--entrypoint",
    "--shm-size",
    "--gpus",
    "--address",
    "--num-cpus",
    "--labels",
    "--help",
    "--device-draft",
    "--require-hashes",
    "--only-binary",
    "--extra-index-url",
    "--torch-backend",
    "--compile-bytecode",
}
"""Options of Ray and of others."""
OTHER_PROGRAMS = {"from-vllm.md", "from-llama-cpp.md"}
"""Pages whose tables begin with names of another program."""
SERVE_FILE = {"applications", "http_options", "proxy_location"}
"""Keys of a file for `serve deploy`."""


def block_name(block: Block) -> str:
    return block.name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a reader's working directory: the repository, with a text and a config of theirs."""
    for name in ("specserve", "deploy", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my-text.txt").write_text(
        Path(cli.__file__).read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "my.yaml").write_text("model: mine\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Blocks that run


def run(block: Block, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    if block.language == "python":
        run_python(block, url)
        return
    for command in guide.commands(block.filled(url) if block.language == "sh" else typed(block)):
        assert command.program in PROGRAMS, (
            f"{block.name}: {command.program} is not run here; "
            "say why above the block: <!-- not run: ... -->"
        )
        PROGRAMS[command.program](command)
        printed = capsys.readouterr().out
        if command.into is not None:
            Path(command.into).write_text(printed, encoding="utf-8")
    if block.language == "console":
        assert printed.split() == block.text.partition("\n")[2].split(), (
            f"{block.name} prints something else now"
        )


def typed(block: Block) -> str:
    """Return the command of a block that shows its output too."""
    assert block.text.startswith("$ ")
    return block.text.partition("\n")[0]


def run_python(block: Block, url: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(block.filled(url), block.page.name, "exec", dont_inherit=True), names)
    finally:
        for value in names.values():
            if isinstance(value, openai.OpenAI):
                value.close()


def run_specserve(command: Command) -> None:
    if command.words[1] == "serve":
        read_config(command)
    else:
        assert cli.main(command.words[1:]) == 0, command.words


def run_python_module(command: Command) -> None:
    subprocess.run([sys.executable, *command.words[1:]], check=True)


def run_curl(command: Command) -> None:
    """Do what the pages use of curl, which may not be installed. Any status but 200 raises."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-d", dest="body")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-s", "-N", action="store_true")
    given = parser.parse_args(command.words[1:])
    headers = dict(header.split(": ", 1) for header in given.headers)
    request = urllib.request.Request(
        given.url, None if given.body is None else given.body.encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    assert '"stream": true' not in (given.body or "") or text.endswith("data: [DONE]\n\n")
    print(text)


PROGRAMS: Mapping[str, Callable[[Command], None]] = {
    "specserve": run_specserve,
    "python": run_python_module,
    "curl": run_curl,
}


# Blocks that are checked without running


def test_every_block_is_of_a_kind_that_is_run_or_checked() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.name}: {block.language}"
        assert block.excuse is None or block.language in ("sh", "console", "python"), (
            f"{block.name} needs no excuse"
        )
    assert {"sh", "console", "python", "yaml", "json", "math"} <= {
        block.language for block in BLOCKS
    }


@pytest.mark.parametrize("block", SHELL, ids=block_name)
def test_every_command_takes_these_options_and_files(block: Block, folder: Path) -> None:
    for command in guide.commands(
        block.filled(guide.URL) if block.language == "sh" else typed(block)
    ):
        if command.program == "specserve":
            arguments.build_parser().parse_args(command.words[1:])
        if (
            command.program == "specserve"
            and command.words[1] == "serve"
            and "draft.path=my-heads" not in command.words
        ):
            read_config(command)
        if command.program == "make":
            assert re.search(
                rf"^{command.words[1]}:",
                (ROOT / "Makefile").read_text(encoding="utf-8"),
                re.MULTILINE,
            )
        for word in command.words[1:]:
            if word.startswith("deploy/") or word == "cluster.yaml":
                assert (ROOT / word).is_file(), word


def read_config(command: Command) -> None:
    config_options.config_from_options(arguments.build_parser().parse_args(command.words[1:]))


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=block_name
)
def test_yaml_is_what_it_is_for(block: Block) -> None:
    tree = yaml.safe_load(block.text)
    if SERVE_FILE & set(tree):
        from ray.serve.schema import ServeDeploySchema  # late: the import itself warns

        (application,) = ServeDeploySchema.model_validate(tree).applications
        assert set(tree) <= set(ServeDeploySchema.model_fields)
        tree = application.args
    for entry in tree.get("llm_configs", ()):
        part("ray_serve_llm.server:config_of")(
            llm_config(loading=entry.pop("model_loading_config"), **entry)
        )
    if "llm_configs" not in tree:
        config_from_keys(tree)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "json"], ids=block_name
)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


def test_a_block_that_is_never_run_would_be_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = guide.blocks_of(DOCS / "new.md", "text\n\n```sh\nkubectl get pods\n```\n")
    with pytest.raises(AssertionError, match="not run"):
        run(block, guide.URL, capsys)
    (excused,) = guide.blocks_of(
        DOCS / "new.md", "<!-- not run: no cluster -->\n```sh\nkubectl get pods\n```\n"
    )
    assert excused.excuse == "no cluster"


# Named things exist


every_page = pytest.mark.parametrize("page", guide.NAMES)


@every_page
def test_every_link_leads_somewhere(page: str) -> None:
    for link in guide.links(guide.page(page)):
        path, _, anchor = link.partition("#")
        file = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        name = str(file.relative_to(ROOT))
        assert name in guide.NAMES or file.exists(), f"{page} links to {link}"
        assert not anchor or anchor in guide.anchors(guide.page(name)), (
            f"{page} links to {link}, and has no such heading"
        )


@every_page
def test_every_option_that_is_named_exists(page: str) -> None:
    known = OTHERS | {
        spelling
        for _, _, parser in commands()
        for action in parser._actions
        for spelling in action.option_strings
    }
    text = guide.page(page)
    if Path(page).name in OTHER_PROGRAMS:
        text = re.sub(r"^\|[^|]*", "", text, flags=re.MULTILINE)
    for span in guide.spans(text):
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
            assert option in known or not span.startswith(("specserve", "--")), (
                f"{page} names {option}"
            )


@every_page
def test_every_key_that_is_named_exists(page: str) -> None:
    known = {key.name for key in all_keys()}
    sections = {name.partition(".")[0] for name in known if "." in name}
    branches = {name.rpartition(".")[0] for name in known}
    for span in guide.spans(guide.page(page)):
        for key in re.findall(
            rf"(?<![\w./])(?:{'|'.join(sections)})(?:\.[a-z_]+)+(?![\w/(])", span
        ):
            assert key in known | branches or key.endswith((".py", ".md", ".json", ".yaml")), (
                f"{page} names {key}"
            )


@every_page
def test_every_value_that_is_named_with_its_key_is_taken(page: str) -> None:
    known = {key.name for key in all_keys()}
    for span in guide.spans(guide.page(page)):
        given = re.fullmatch(r"(?:--set )?([a-z_.]+)=\S+", span)
        if given is not None and given[1] in known:
            config_from_keys(dict([parse_override(span.removeprefix("--set "))]))


def test_every_page_has_its_place_in_the_navigation() -> None:
    tree = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(_leaves(tree["nav"]))
    assert len(set(listed)) == len(listed)
    at_the_top = {"README.md", "CONTRIBUTING.md"}
    assert {f"docs/{name}" for name in listed} == set(guide.NAMES) - at_the_top | {
        "docs/CHANGELOG.md",
        "docs/CONTRIBUTING.md",
    }


def _leaves(tree: Any) -> Iterator[str]:
    for entry in tree if isinstance(tree, list) else tree.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from _leaves(entry)


def _pieces(text: str) -> list[str]:
    """Return each row of a table and each paragraph as one piece."""
    lines = re.sub(r"^(\|.*)$", r"\n\1\n", text, flags=re.MULTILINE)
    return re.split(r"\n\s*\n", lines)


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:[.,]\d+)*", text))


CLAIMS = [row for row in guide.rows(guide.page("docs/measured.md")) if len(row) == 7]


def test_each_claim_has_its_figure_command_and_date_on_the_page_that_it_links_to() -> None:
    assert len(CLAIMS) > 100
    for what, figure, _, command, date, machine, link in CLAIMS:
        (page,) = guide.links(link)
        text = guide.page(f"docs/{page}")
        numbers = _numbers(figure)
        assert any(numbers <= _numbers(piece) for piece in _pieces(text)), (
            f"docs/{page} has other figures now of {what}: {figure}"
        )
        assert command.strip("`") in text, f"docs/{page} does not name {command}"
        assert date in text, f"docs/{page} has no {date}"
        assert machine, what


def test_every_page_of_measurements_has_a_claim() -> None:
    linked = {page for *_, link in CLAIMS for page in guide.links(link)}
    assert linked == {f"measurements/{file.name}" for file in (DOCS / "measurements").glob("*.md")}


CODE = [
    file.relative_to(ROOT)
    for folder in ("specserve", "lab", "tests", "docs")
    for file in (ROOT / folder).rglob("*.py")
]
PUBLIC = ("specserve/", "lab/", "tests/", "docs/", "deploy/")


@every_page
def test_every_file_that_is_named_exists(page: str) -> None:
    """Python files are named from the top, from `specserve/`, or by their name alone."""
    text = guide.page(page)
    names = {str(file) for file in CODE}
    names |= {name.removeprefix("specserve/") for name in names} | {file.name for file in CODE}
    for name in re.findall(r"(?<![\w/.*-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b", text):
        assert name in names, f"{page} names {name}"
    for span in guide.spans(text):
        for name in re.findall(r"(?<![\w/.-])[\w./-]+", span):
            if name.startswith(PUBLIC) and "*" not in span:
                assert (ROOT / name.rstrip(".")).exists(), f"{page} names {name}"


@every_page
def test_every_module_that_is_run_by_name_exists(page: str) -> None:
    for module in re.findall(r"python -m ((?:specserve|lab|tests)\b[\w.]*)", guide.page(page)):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), (
            f"{page} runs {module}"
        )


@every_page
def test_every_make_target_that_is_named_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for span in guide.spans(guide.page(page)):
        for target in re.findall(r"^make ([a-z-]+)(?![\w*-])", span):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page} names make {target}"


OUTSIDE_CLASSES = {"PrefixCacheAffinityRouter", "PrometheusRule", "SamplingParams"}


@every_page
def test_every_class_that_is_named_exists(page: str) -> None:
    classes = {
        found
        for file in CODE
        for found in re.findall(r"^class (\w+)", (ROOT / file).read_text("utf-8"), re.MULTILINE)
    }
    for span in guide.spans(guide.page(page)):
        if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", span):
            assert span in classes | OUTSIDE_CLASSES, f"{page} names {span}"


def test_every_word_of_the_glossary_is_used_by_the_file_it_names() -> None:
    placement = {"apart", "together"}  # in prose only; the code's words are in the same entries
    pattern = r"^- \*\*(.+?)\*\*: (.+) \(`([\w/.]+)`\)$"
    page = re.sub(r"\n  (?=\S)", " ", guide.page("docs/glossary.md"))  # an entry, a line
    lines = [line for line in page.splitlines() if line[:2] == "- "]
    assert len(lines) > 50
    for line in lines:
        entry = re.fullmatch(pattern, line)
        assert entry is not None, line
        folder = ROOT if entry[3].startswith("lab/") else ROOT / "specserve"
        text = _plain((folder / entry[3]).read_text(encoding="utf-8"))
        for term in entry[1].split(", "):
            found = re.search(rf"\b{re.escape(_plain(term))}", text)
            assert found or term in placement, f"{entry[3]} does not say {term}"


def _plain(text: str) -> str:
    """Return lower-case words, with names in camel case or with underscores taken apart."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).replace("_", " ").replace("-", " ")
    return re.sub(r"\s+", " ", apart).lower()


def test_every_change_of_a_newcomer_has_its_files() -> None:
    section = re.split(r"^## ", guide.page("CONTRIBUTING.md"), flags=re.MULTILINE)
    (changes,) = (part for part in section if part.startswith("Where a change goes"))
    found = {change: re.findall(r"`([\w/.]+)`", files) for change, files in guide.rows(changes)}
    assert len(found) == 12
    for change, files in found.items():
        assert files, change
        for file in files:
            assert (ROOT / file).exists(), f"{change}: {file}"


def test_the_readme_is_short_and_its_reading_order_takes_an_evening() -> None:
    text = guide.page("README.md")
    assert len(text.splitlines()) <= 120
    files = re.findall(r"^\d\. `([\w/.]+)`", text, re.MULTILINE)
    lines = [
        len((ROOT / "specserve" / file).read_text(encoding="utf-8").splitlines()) for file in files
    ]
    assert len(files) == 8
    assert 1_500 < sum(lines) < 2_600
