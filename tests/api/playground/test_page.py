"""The playground's files as they are served: types, content policy and access.

Their behaviour is tested in a browser.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.http_server import serving

PLAYGROUND = files("specserve.api").joinpath("playground")
NAMES = sorted(
    file.name for file in PLAYGROUND.iterdir() if file.is_file() and not file.name.endswith(".py")
)
MARKUP = PLAYGROUND.joinpath("index.html").read_text(encoding="utf-8")
REFERENCE = PLAYGROUND.joinpath("reference.html").read_text(encoding="utf-8")
SCRIPTS = {
    name: PLAYGROUND.joinpath(name).read_text(encoding="utf-8")
    for name in NAMES
    if name.endswith(".js")
}


def test_every_part_is_served_with_its_type_and_a_policy_that_lets_nothing_else_in() -> None:
    types = {
        "css": "text/css",
        "html": "text/html",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    with serving() as server:
        assert server.ask("/").body == server.ask("/playground/index.html").body
        assert server.ask("/docs").body == server.ask("/playground/reference.html").body
        for name in NAMES:
            reply = server.ask(f"/playground/{name}")
            assert (reply.status, reply.headers["content-type"].partition(";")[0]) == (
                200,
                types[name.rpartition(".")[2]],
            )
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "..%2fapp.py", "__init__.py", ""])
def test_nothing_but_the_parts_is_served(name: str) -> None:
    with serving() as server:
        assert server.ask(f"/playground/{name}").status == 404


def test_the_page_needs_nothing_from_elsewhere_and_finds_its_parts_under_any_path() -> None:
    assert not [
        name
        for name, text in SCRIPTS.items()
        if re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    ]
    loaded = re.findall(r"(?:src|href)=\"([^\"#]+)\"", MARKUP)
    assert {*loaded} == {
        "playground/icon.svg",
        "playground/style.css",
        "playground/main.js",
        "docs",
        "metrics",
        "trace",
    }
    assert {*re.findall(r"(?:src|href)=\"([^\"#]+)\"", REFERENCE)} == {
        "playground/icon.svg",
        "playground/style.css",
        "playground/reference.css",
        "playground/reference.js",
        "openapi.json",
        "./",
    }
    asked = {
        path
        for text in SCRIPTS.values()
        for path in re.findall(
            r"[\"`](/?(?:v1/[a-z/]+|ready|trace|metrics|openapi\.json)\b)[^\"`]*[\"`]", text
        )
    }
    assert asked == {
        "v1/models",
        "v1/completions",
        "v1/chat/completions",
        "ready",
        "trace",
        "metrics",
        "openapi.json",
    }, "paths that begin with a slash would miss a prefix"


def test_every_part_is_loaded_by_another_or_by_the_page() -> None:
    imported = {
        name for text in SCRIPTS.values() for name in re.findall(r"from \"\./([a-z]+\.js)\"", text)
    }
    pages = {"main.js", "index.html", "style.css", "icon.svg"}
    pages |= {"reference.js", "reference.html", "reference.css"}
    assert imported | pages == {*NAMES}


def test_data_cannot_become_markup_and_is_not_kept_beyond_the_tab() -> None:
    whole = "\n".join(SCRIPTS.values())
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "localStorage",
        "cookie",
        "indexedDB",
    ):
        assert way not in whole
    assert whole.count("sessionStorage.setItem") == 1


def test_nothing_in_the_markup_would_need_a_laxer_policy() -> None:
    for markup in (MARKUP, REFERENCE):
        assert not re.findall(
            r"<style|<script(?! type=\"module\" src)|\sstyle=|\son[a-z]+=", markup
        )


def test_with_api_keys_the_page_is_open_and_the_api_is_not(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("a-key\n")
    with serving(config={"http.api_keys_file": str(file)}) as server:
        assert {
            server.ask(path).status
            for path in ("/", "/docs", *(f"/playground/{name}" for name in NAMES))
        } == {200}
        assert {
            server.ask(path).status
            for path in ("/playground/nothing.js", "/v1/models", "/openapi.json")
        } == {401}
    with serving(
        config={"http.api_keys_file": str(file), "http.open_paths": ["/health"]}
    ) as server:
        assert {server.ask(path).status for path in ("/", "/docs", "/playground/main.js")} == {
            401
        }, "a page that was closed stays closed"


def test_behind_a_prefix_the_page_and_its_parts_are_the_same(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("a-key\n")
    with serving(config={"http.root_path": "/models", "http.api_keys_file": str(file)}) as server:
        for path in ("/", "/docs", "/playground/main.js"):
            assert server.ask("/models" + path).status == server.ask(path).status == 200


def test_a_trace_may_be_asked_for_in_part() -> None:
    with serving() as server:
        assert server.ask("/trace?rounds=3").json == {"traceEvents": [], "rounds": 3}
        assert server.ask("/trace").json == {"traceEvents": []}
        for wrong in ("0", "2001", "-1", "x", "1.5"):
            reply = server.ask(f"/trace?rounds={wrong}")
            assert (reply.status, reply.error["param"]) == (400, "rounds")
