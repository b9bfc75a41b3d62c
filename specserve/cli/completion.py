"""Shell completion, generated from the tree of arguments: commands, options, and what may follow each. Knows no command's work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from specserve.config.fields import all_keys
from specserve.config.tree import DRAFT_KINDS, Config
from specserve.tools.reproduce.options import TABLES
from specserve.types import VERIFIERS

SHELLS = ("bash", "zsh", "fish")
_KEYS = tuple(all_keys(Config))


class Kind(Enum):
    """What follows an option, or stands for itself."""

    NOTHING = auto()  # a switch
    ANYTHING = auto()  # nobody can guess it
    FILES = auto()
    DIRECTORIES = auto()
    WORDS = auto()
    KEYS = auto()  # of the config, an = behind


@dataclass(frozen=True, slots=True)
class Value:
    kind: Kind
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    names: tuple[str, ...]
    value: Value
    help: str
    many: bool  # values behind one another


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    help: str
    options: tuple[Option, ...]
    rest: Value  # what is no option


BY_METAVAR: Mapping[str, Value] = {  # argparse knows no more of a value than how --help calls it
    "FILE": Value(Kind.FILES),
    "CONFIG": Value(Kind.FILES),
    "DIR": Value(Kind.DIRECTORIES),
    "M": Value(Kind.DIRECTORIES),
    "D": Value(Kind.WORDS, DRAFT_KINDS),
    "V": Value(Kind.WORDS, VERIFIERS),
    "TABLE": Value(Kind.WORDS, tuple(TABLES)),
    "a.b=c": Value(
        Kind.KEYS,
        tuple(key for key in _KEYS if not any(other.startswith(f"{key}.") for other in _KEYS)),
    ),  # no sections
}


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """For one of SHELLS, to be read by it."""
    return "\n".join(WRITERS[shell](tuple(commands(parser)))) + "\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    (choices,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    says = {action.dest: action.help or "" for action in choices._choices_actions}
    for name, own in choices.choices.items():
        options = tuple(_option(action) for action in own._actions if action.option_strings)
        rest = next(
            (_value(action) for action in own._actions if not action.option_strings),
            Value(Kind.NOTHING),
        )
        yield Command(name, says[name], options, rest)


def _option(action: argparse.Action) -> Option:
    return Option(
        tuple(action.option_strings),
        _value(action),
        action.help or "",
        many=action.nargs in ("+", "*"),
    )


def _value(action: argparse.Action) -> Value:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return Value(Kind.NOTHING)
    if action.choices is not None:
        return Value(Kind.WORDS, tuple(map(str, action.choices)))
    return BY_METAVAR.get(str(action.metavar), Value(Kind.ANYTHING))


def _bash(found: Sequence[Command]) -> Iterator[str]:
    """Bash takes a word apart at `=`, so that what follows one is a word of its own, of which nothing is known."""
    yield "# specserve completion bash >> ~/.bashrc"
    yield "_specserve() {"
    yield '    local current=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} before="" word'
    yield '    for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do [[ $word == -* ]] && before=$word; done'
    yield "    COMPREPLY=()"
    yield "    [[ $current == = || ${COMP_WORDS[COMP_CWORD-1]} == = ]] && return"
    first = " ".join(command.name for command in found)
    yield f'    ((COMP_CWORD == 1)) && {{ COMPREPLY=($(compgen -W "{first} --help --version" -- "$current")); return; }}'
    yield '    [[ $current == -* ]] && before=""'
    yield '    [[ ${COMP_WORDS[COMP_CWORD-1]} == "$before" || " $(_specserve_many "$command") " == *" $before "* ]] || before=""'
    yield '    case "$command $before" in'
    for command in found:
        for option in command.options:
            if option.value.kind is not Kind.NOTHING:
                patterns = "|".join(f'"{command.name} {name}"' for name in option.names)
                yield f"        {patterns}) {_BASH[option.value.kind](option.value)} ;;"
    for command in found:
        names, rest = (
            tuple(name for option in command.options for name in option.names),
            _BASH[command.rest.kind](command.rest),
        )
        yield f'        "{command.name} "*) if [[ $current == -* ]]; then {_BASH[Kind.WORDS](Value(Kind.WORDS, names))}; else {rest}; fi ;;'
    yield "    esac"
    yield "}"
    yield "_specserve_many() {"
    yield "    case $1 in"
    for command in found:
        many = " ".join(name for option in command.options if option.many for name in option.names)
        if many:
            yield f'        {command.name}) echo "{many}" ;;'
    yield "    esac"
    yield "}"
    yield "complete -F _specserve specserve"


_BASH: Mapping[Kind, Callable[[Value], str]] = {
    Kind.NOTHING: lambda _: ":",
    Kind.ANYTHING: lambda _: ":",
    Kind.FILES: lambda _: (
        'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current")'
    ),
    Kind.DIRECTORIES: lambda _: (
        'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$current")'
    ),
    Kind.WORDS: lambda value: f'COMPREPLY=($(compgen -W "{" ".join(value.words)}" -- "$current"))',
    Kind.KEYS: lambda value: (
        f'compopt -o nospace; COMPREPLY=($(compgen -S = -W "{" ".join(value.words)}" -- "$current"))'
    ),
}


def _zsh(found: Sequence[Command]) -> Iterator[str]:
    yield "#compdef specserve"
    yield "# specserve completion zsh > ~/.zfunc/_specserve, where fpath has ~/.zfunc"
    yield "_specserve() {"
    yield "    if ((CURRENT == 2)); then"
    yield "        local -a commands=("
    for command in found:
        yield f"            {_quoted(f'{command.name}:{command.help}')}"
    yield "        )"
    yield "        _describe command commands"
    yield "        return"
    yield "    fi"
    yield "    local command=$words[2]"
    yield "    shift words; ((CURRENT--))"
    yield "    case $command in"
    for command in found:
        yield f"        {command.name}) _arguments \\"
        for option in command.options:
            for name in option.names:
                yield f"            {_quoted(_zsh_option(name, option))} \\"
        yield f"            {_quoted('*:value:' + _ZSH[command.rest.kind](command.rest))} ;;"
    yield "    esac"
    yield "}"
    yield 'if [[ $funcstack[1] == _specserve ]]; then _specserve "$@"; else compdef _specserve specserve; fi'


def _zsh_option(name: str, option: Option) -> str:
    says = option.help.translate(str.maketrans("[]:", "();"))
    if option.value.kind is Kind.NOTHING:
        return f"*{name}[{says}]"
    values = ":*-*:value:" if option.many else ":value:"
    return f"*{name}[{says}]{values}{_ZSH[option.value.kind](option.value)}"


_ZSH: Mapping[Kind, Callable[[Value], str]] = {
    Kind.NOTHING: lambda _: " ",
    Kind.ANYTHING: lambda _: " ",
    Kind.FILES: lambda _: "_files",
    Kind.DIRECTORIES: lambda _: "_files -/",
    Kind.WORDS: lambda value: f"({' '.join(value.words)})",
    Kind.KEYS: lambda value: f"compadd -S = - {' '.join(value.words)}",
}


def _fish(found: Sequence[Command]) -> Iterator[str]:
    yield "# specserve completion fish > ~/.config/fish/completions/specserve.fish"
    yield "complete -c specserve -f"
    for command in found:
        yield f"complete -c specserve -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help)}"
        here = f"complete -c specserve -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            yield " ".join(
                part
                for part in (
                    here,
                    names,
                    _FISH[option.value.kind](option.value),
                    f"-d {_quoted(option.help)}",
                )
                if part
            )
        if command.rest.kind not in (Kind.NOTHING, Kind.ANYTHING):
            yield f"{here} {_FISH[command.rest.kind](command.rest).replace('-x ', '').replace('-r ', '')}"


_FISH: Mapping[Kind, Callable[[Value], str]] = {
    Kind.NOTHING: lambda _: "",
    Kind.ANYTHING: lambda _: "-x",
    Kind.FILES: lambda _: "-r -F",
    Kind.DIRECTORIES: lambda _: "-x -a '(__fish_complete_directories)'",
    Kind.WORDS: lambda value: f"-x -a '{' '.join(value.words)}'",
    Kind.KEYS: lambda value: f"-x -a '{' '.join(f'{word}=' for word in value.words)}'",
}

WRITERS: Mapping[str, Callable[[Sequence[Command]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}


def _quoted(text: str) -> str:
    """For a POSIX shell; fish reads it likewise."""
    return "'" + text.replace("'", "'\\''") + "'"
