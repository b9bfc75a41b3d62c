"""`specserve keys`: new keys, the list without keys, and everything that is wrong with a file."""

from __future__ import annotations

import os
import stat
from datetime import date
from pathlib import Path

import pytest

from specserve.api.keys import ApiKeys
from specserve.cli.main import main
from specserve.errors import ConfigError
from specserve.tools.api_keys import create_key

BROKEN = """alice first-secret
al/ice second-secret
bob third-secret requests_per_minute=0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def run(*words: str, file: Path) -> int:
    return main(["keys", *words, "--file", str(file)])


def test_a_created_key_is_printed_once_and_opens_a_server(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("--tokens-per-minute", "100000", "--concurrent-requests", "8")
    others = ("--expires", "2027-01-31", "--scopes", "generate,trace")
    assert run("create", "alice", *limits, *others, file=file) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert key not in printed.err
    assert len(key) > 40
    client = ApiKeys.from_file(file).find(key, date(2027, 1, 31))
    assert client is not None
    assert (client.name, client.limits) == ("alice", (None, 100_000, 8))
    assert client.expires == date(2027, 1, 31)
    assert client.scopes == {"generate", "trace"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_further_key_keeps_lines_and_comments_and_takes_the_client_s_limits(file: Path) -> None:
    file.write_text("# ours\nalice one requests_per_minute=7  # old")  # without a last line's end
    file.chmod(0o644)
    new, other = create_key(file, "alice", {}), create_key(file, "bob", {})
    assert file.read_text().startswith("# ours\nalice one requests_per_minute=7  # old\nalice sk-")
    keys = ApiKeys.from_file(file)
    found = [keys.find(key) for key in ("one", new, other)]
    assert [client and client.limits for client in found] == [
        (7, None, None),
        (7, None, None),
        (None, None, None),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["keys"], "no other file is left"


def test_a_key_is_added_behind_a_link_which_stays_one(file: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(file)
    key = create_key(link, "alice", {})
    assert link.is_symlink()
    assert ApiKeys.from_file(file).find(key) is not None


@pytest.mark.parametrize(
    ("before", "words", "said"),
    [
        ("", ("create", "al/ice"), "line 1 must begin with a name"),
        ("", ("create",), "say whose key it is"),
        ("", ("create", "alice", "--tokens-per-minute", "0"), "line 1 may say"),
        ("", ("create", "alice", "--expires", "soon"), "a day is written 2027-01-31"),
        ("", ("create", "alice", "--scopes", "all"), "scopes must be some of"),
        ("alice one\n", ("create", "alice", "--tokens-per-minute", "5"), "different rates"),
        (BROKEN, ("create", "carol"), "line 2 must begin with a name"),
        ("", ("list",), "it has no key"),
        ("alice one\n", ("list", "alice"), "takes --file alone"),
        ("alice one\n", ("check", "--expires", "2027-01-31"), "takes --file alone"),
    ],
)
def test_what_cannot_be_done_exits_with_2_and_changes_nothing(
    file: Path,
    before: str,
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file.write_text(before)
    assert run(*words, file=file) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "secret" not in printed.err
    assert (printed.out, file.read_text()) == ("", before)


def test_a_directory_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        create_key(file / "below", "alice", {})
    assert not file.exists()


def test_the_list_has_names_and_limits_and_no_keys(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("# ours\nalice secret-1 requests_per_minute=60 scopes=trace\nsecret-2\n")
    assert run("list", file=file) == 0
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()] == [
        ["line", "name", "limits", "expires", "scopes"],
        ["2", "alice", "requests_per_minute=60", "-", "trace"],
        ["3", "line-3", "-", "-", "generate,trace,metrics"],
    ]


def test_check_names_every_line_that_is_wrong(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(BROKEN)
    assert run("check", file=file) == 2
    said = capsys.readouterr().err
    assert "line 2 must begin with a name" in said
    assert "line 3 may say" in said
    assert "secret" not in said
    file.write_text("alice one\nbob two\nbob one\nalice three tokens_per_minute=9\n")
    assert run("check", file=file) == 2
    said = capsys.readouterr().err
    assert "line 3: a key is there twice; it is that of line 1" in said
    assert "line 4: the keys of alice have different rates" in said


def test_check_of_a_valid_file_says_what_may_surprise(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("alice one\nbob two expires=2020-01-01\n")
    file.chmod(0o644)
    assert run("check", file=file) == 0
    said = capsys.readouterr().out
    assert "2 keys of 2 clients" in said
    assert "mode 644" in said
    assert "line 2: this key of bob has expired" in said
    file.chmod(0o600)
    assert run("check", file=file) == 0
    assert "mode" not in capsys.readouterr().out
