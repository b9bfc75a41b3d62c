"""The file of API keys: its format, its errors, and changes while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from specserve.api.key_file import GRACE_S, KeyFile
from specserve.api.keys import MAX_KEYS, ApiKeys
from specserve.errors import ConfigError, Unavailable
from tests.support.clock import Clock
from tests.support.http_server import serving

GOOD = """
# ours
alice  secret-of-alice  requests_per_minute=60 tokens_per_minute=100000
bob    secret-of-bob    # no rates
bob    next-of-bob
a-key-alone
"""


def test_names_and_rates_are_read_and_keys_are_not_kept(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text(GOOD)
    keys = ApiKeys.from_file(file)
    assert len(keys) == 4
    alice, bob = keys.find("secret-of-alice"), keys.find("secret-of-bob")
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.rates, bob.name, bob.rates) == (
        "alice",
        (60, 100_000),
        "bob",
        (None, None),
    )
    assert bob == keys.find("secret-of-bob") != keys.find("next-of-bob")
    alone = keys.find("a-key-alone")
    assert alone is not None
    assert alone.name == "line-6"
    for wrong in ("", "alice", "secret-of-alicf", "secret-of-alic", "secret-of-alice\0", "\ud800"):
        assert keys.find(wrong) is None
    assert "secret" not in repr((vars(keys), alice, bob))


def test_limits_may_be_those_of_one_model(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text(
        "alice k requests_per_minute=9 tokens_per_minute:org/large=50 concurrent_requests:small=2\n"
    )
    alice = ApiKeys.from_file(file).find("k")
    assert alice is not None
    large, small = alice.for_model("org/large"), alice.for_model("small")
    assert large is not None
    assert small is not None
    assert (large.name, large.limits) == ("alice:org/large", (None, 50, None))
    assert (small.name, small.limits) == ("alice:small", (None, None, 2))
    assert alice.for_model("other") is None
    assert alice.limits == (9, None, None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        ("ok k1\nal/ice k2", "line 2 must begin with a name"),
        ("x" * 65 + " k", "line 1 must begin with a name"),
        ("alice k requests_per_minute=0", "line 1 may say"),
        ("alice k requests_per_minute=-1", "line 1 may say"),
        ("alice k tokens_per_minute=many", "line 1 may say"),
        ("alice k tokens_per_minute=" + "9" * 5000, "line 1 may say"),
        ("alice k tokens_per_minute=1 tokens_per_minute=2", "line 1 may say"),
        ("alice k tokens=1", "line 1 may say"),
        ("alice k expires=tomorrow", "line 1: expires must be a day"),
        ("alice k expires=2027-01-01 expires=2027-01-02", "line 1 may say"),
        ("alice k concurrent_requests=0", "line 1 may say"),
        ("alice k scopes=generate,all", "line 1: scopes must be some of generate,trace,metrics"),
        ("alice k scopes=", "line 1: scopes must be some of"),
        ("alice k scopes=trace scopes=trace", "line 1 may say"),
        ("alice k concurrent_requests=1\nalice l concurrent_requests=2", "different rates"),
        ("alice k another", "line 1 may say"),
        ("alice k tokens_per_minute:=1", "line 1 may say"),
        ("alice k expires:m=2027-01-01", "line 1 may say"),
        ("alice k tokens_per_minute:m=1 tokens_per_minute:m=2", "line 1 may say"),
        ("alice k1 tokens_per_minute:m=1\nalice k2", "different rates"),
        ("alice same\nbob same", "a key is there twice"),
        ("alice k1 tokens_per_minute=1\nalice k2", "different rates"),
        ("\n".join(f"key-{number}" for number in range(MAX_KEYS + 1)), "1000 is the most"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_quoting_a_key(
    tmp_path: Path, content: str | bytes | None, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="api_keys_file") as refusal:
        ApiKeys.from_file(file)
    assert said in str(refusal.value)
    assert "another" not in str(refusal.value)
    assert "same" not in str(refusal.value).replace("the same for all", "")


Watched = tuple[Path, Clock, Callable[[str], bool]]
"""A file of keys, the clock of its KeyFile, and whether that takes a key."""


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    (file := tmp_path / "keys").write_text("old-key\n")
    keys = KeyFile(file, clock := Clock())
    return file, clock, lambda key: keys.find(key) is not None


def test_a_changed_file_is_used_a_second_later_and_not_before(watched: Watched) -> None:
    file, clock, admits = watched
    file.write_text("new-key\nand-another\n")
    clock.now = 0.9
    assert (admits("old-key"), admits("new-key")) == (True, False)
    clock.now = 1.0
    assert (admits("old-key"), admits("new-key")) == (False, True)


@pytest.fixture(params=["", "alice k nonsense=1", None], ids=["empty", "invalid", "gone"])
def broken(watched: Watched, request: pytest.FixtureRequest) -> Watched:
    """Break the file at second 1."""
    file, clock, admits = watched
    if request.param is None:
        file.unlink()
    else:
        file.write_text(request.param)
    clock.now = 1.0
    assert admits("old-key")
    return watched


def test_a_broken_file_keeps_the_old_keys_for_a_grace_and_says_why_once(
    broken: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock, admits = broken
    for clock.now in (2.0, 3.0, GRACE_S + 0.9):
        assert admits("old-key")
        assert not admits("wrong-key")
    records = [*caplog.get_records("setup"), *caplog.get_records("call")]
    (error,) = [record for record in records if record.levelno >= logging.ERROR]
    assert "the 1 keys known until now stay for 60 s" in error.getMessage()
    file.write_text("mended-key\n")
    clock.now += 1.0
    assert admits("mended-key")
    assert not admits("old-key")


def test_behind_the_grace_no_key_is_taken_until_the_file_is_valid(broken: Watched) -> None:
    """Keys that were revoked meanwhile are among the old ones."""
    file, clock, admits = broken
    clock.now = 1.0 + GRACE_S
    for key in ("old-key", "wrong-key"):
        with pytest.raises(Unavailable, match="cannot be checked"):
            admits(key)
    file.write_text("old-key\n")
    clock.now += 1.0
    assert admits("old-key")


def test_another_way_of_being_broken_does_not_begin_a_new_grace(watched: Watched) -> None:
    file, clock, admits = watched
    for clock.now in range(1, int(GRACE_S) + 1):
        file.write_text("" if clock.now % 2 else "alice k nonsense=1")
        assert admits("old-key")
    clock.now = GRACE_S + 1
    with pytest.raises(Unavailable):
        admits("old-key")


def test_an_unchanged_file_that_can_be_read_again_is_trusted_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that fails for a moment changes no stamp."""
    file, clock, admits = watched
    file.touch()
    with monkeypatch.context() as failing:
        failing.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "x")))
        clock.now = 1.0
        assert admits("old-key")
    clock.now = 2.0
    assert admits("old-key")
    clock.now = GRACE_S + 2
    assert admits("old-key")


def test_a_link_that_is_turned_to_another_file_is_a_change(tmp_path: Path) -> None:
    for name in ("first", "other"):
        (tmp_path / name).write_text(f"{name}-key\n")
    (link := tmp_path / "keys").symlink_to("first")
    keys = KeyFile(link, clock := Clock())
    link.unlink()
    link.symlink_to("other")
    clock.now = 1.0
    assert keys.find("other-key") is not None
    assert keys.find("first-key") is None


def test_a_running_server_changes_its_keys_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.api.key_file.CHECK_EVERY_S", 0.05)
    (file := tmp_path / "keys").write_text("old-key\n")
    with serving(config={"http.api_keys_file": str(file)}) as server:

        def status(key: str) -> int:
            return server.ask("/v1/models", headers={"Authorization": f"Bearer {key}"}).status

        assert (status("old-key"), status("new-key")) == (200, 401)
        file.write_text("carol new-key\n")
        assert server.until(lambda: status("new-key") == 200)
        assert status("old-key") == 401


def test_a_broken_file_shows_in_health_readiness_and_metrics_before_it_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve.api.key_file.CHECK_EVERY_S", 0.0)
    (file := tmp_path / "keys").write_text("bob bobs-key\n")
    with serving(config={"http.api_keys_file": str(file)}) as server:

        def ask(path: str) -> tuple[int, str]:
            reply = server.ask(path, headers={"Authorization": "Bearer bobs-key"})
            return reply.status, reply.body.decode()

        def gauge() -> str:
            return next(
                line.split()[1]
                for line in ask("/metrics")[1].splitlines()
                if line.startswith("specserve_api_keys_valid ")
            )

        well = (200, '{"status":"healthy","reproducible":true}')
        assert (ask("/health"), gauge()) == (well, "1")
        file.write_text("bob bobs-key\nal/ice alices-key\n")
        for path in ("/health", "/ready"):
            status, body = ask(path)
            assert status == 200
            assert "line 2 must begin with a name" in body
            assert "are valid for" in body
            assert "alices-key" not in body
            assert str(file) not in body
        assert (gauge(), ask("/v1/models")[0]) == ("0", 200)
        monkeypatch.setattr("specserve.api.key_file.GRACE_S", 0.0)
        status, body = ask("/health")
        assert (status, "every key is refused" in body) == (200, True)
        assert ask("/ready")[0] == 503
        refused = server.ask("/v1/models", headers={"Authorization": "Bearer bobs-key"})
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        file.write_text("bob bobs-key\n")
        assert ask("/v1/models")[0] == ask("/ready")[0] == 200
        assert gauge() == "1"


def test_a_key_is_valid_up_to_its_last_day(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("bob k1 expires=2026-12-31\nbob k2\n")
    keys = ApiKeys.from_file(file)
    assert keys.find("k1", date(2026, 12, 31)) is not None
    assert keys.find("k1", date(2027, 1, 1)) is None
    assert keys.find("k2", date(2027, 1, 1)) is not None


@pytest.mark.parametrize("shared", [False, True])
def test_only_requests_of_one_name_and_salt_share_pages(tmp_path: Path, shared: bool) -> None:
    (file := tmp_path / "keys").write_text("alice k1\nalice k2\nbob k3\n")
    config = {"http.api_keys_file": str(file), "cache.shared": shared}
    with serving(config=config) as server:

        def salt(key: str, **members: object) -> bytes:
            body = {"model": "demo", "prompt": "x", "max_tokens": 1, **members}
            headers = {"Authorization": f"Bearer {key}"}
            assert server.ask("/v1/completions", body, headers=headers).status == 200
            return server.service.requests[-1].cache_salt

        alice, bob, mine = salt("k1"), salt("k3"), salt("k1", cache_salt="mine")
        assert salt("k2") == alice
        assert (alice == bob) == shared
        assert mine not in (alice, salt("k1", cache_salt="other"))
        assert (mine == salt("k3", cache_salt="mine")) == shared
