"""The options that stand for keys of a config, and the config that they make."""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve.cli.default_model import default_model
from specserve.cli.parser import BadUsage
from specserve.config.tree import Config, config_from_file, parse_override
from specserve.errors import ConfigError

SHORT_NAMES = {
    "target": "target.path",
    "draft": "draft.path",
    "drafter": "draft.kind",
    "tp": "target.tensor_parallel",
    "host": "http.host",
    "port": "http.port",
    "name": "name",
}

NO_DRAFT = "none"  # as --draft and --drafter
NO_DRAFT_NOTICE = (
    "no draft: plain decoding; `--draft M` names a smaller model of the same tokenizer, "
    "`--draft none` keeps it plain"
)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add what names the config of a command, and changes it."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML; see docs/guides/deploying.md"
    )
    parser.add_argument(
        "--target",
        metavar="M",
        help="a local directory, a GGUF file or a hub name; the demo pair's by default",
    )
    parser.add_argument(
        "--draft",
        metavar="M",
        help="a local directory, a GGUF file or a hub name, or none for plain decoding; "
        "without it a target of yours is decoded plainly",
    )
    parser.add_argument(
        "--set",
        type=_override,
        action="append",
        default=[],
        metavar="a.b=c",
        help="any key of the config, such as speculation.gamma=5",
    )


def config_from_options(options: argparse.Namespace) -> Config:
    """Return the config file, overridden by `--set`, and by the options that are short for keys.

    Raises ConfigError.
    """
    short = {key: getattr(options, name, None) for name, key in SHORT_NAMES.items()}
    if options.draft == NO_DRAFT:
        if short["draft.kind"] not in (None, NO_DRAFT):
            raise BadUsage(f"--draft none contradicts --drafter {short['draft.kind']}; give one")
        short |= {"draft.path": None, "draft.kind": NO_DRAFT}
    return config_from_file(
        options.config,
        dict(options.set) | {key: value for key, value in short.items() if value is not None},
        default_model=default_model,
    )


def draft_notice(options: argparse.Namespace, config: Config) -> str | None:
    """Return the notice that nothing drafts; None if something does or if that was requested."""
    is_asked = (
        options.draft == NO_DRAFT
        or getattr(options, "drafter", None) == NO_DRAFT
        or ("draft.kind", NO_DRAFT) in options.set
    )
    return NO_DRAFT_NOTICE if config.draft.kind == NO_DRAFT and not is_asked else None


def _override(argument: str) -> tuple[str, object]:
    try:
        return parse_override(argument)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
