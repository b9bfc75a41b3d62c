"""Hooks of mkdocs: add pages made from the program, and files outside docs/ that pages link to."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs._build.pages import BESIDE, PAGES, rendered

ROOT = Path(__file__).parents[1]
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*\brel=["']?(?:stylesheet|preload|preconnect)\b[^>]*//"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    for name in BESIDE:
        for file in sorted((ROOT / name).rglob("*")) if name.endswith("/") else [ROOT / name]:
            if file.is_dir():
                continue
            files.append(
                File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file))
            )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in BESIDE:  # written for the top of the repository
        markdown = markdown.replace("](docs/", "](")
    return rendered(markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raise if the page would load anything from elsewhere: the site must work offline."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} would load something from elsewhere: {found[0]}")
    return output
