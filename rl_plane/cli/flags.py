"""argparse over the table of settings: each flag's help names its variable, and errors are one line."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from rl_plane.cli.settings import SETTINGS, BadSetting, Setting, resolve

Handler = Callable[["Command"], int]
Subparsers = Any
"""argparse's `_SubParsersAction`, which has no public name."""

ENGINES_GROUP = "rl_plane.engines"


class Parser(argparse.ArgumentParser):
    """Raises where argparse prints its usage and exits; knows no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise BadSetting(message, fix=f"see `{self.prog} --help`")


class Command:
    """One command as it was given: its settings, and what else stood on the line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.flags: dict[str, Any] = vars(args)
        """What was really given as a flag, by the setting's name."""
        self.handler: Handler = self.flags.pop("_handler")
        self.values = resolve(self.flags.pop("_settings"), self.flags, os.environ)


def add_command(
    commands: Subparsers, name: str, doc: str, handler: Handler, settings: Iterable[str]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=doc, description=doc)
    names = tuple(settings)
    parser.set_defaults(_handler=handler, _settings=names)
    for each in names:
        _add_flag(parser, SETTINGS[each])
    return parser


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": _help(setting)}
    if setting.parse is None:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = setting.metavar or setting.option[2:].replace("-", "_").upper()
        if setting.separator:
            options["action"] = "append"
    parser.add_argument(setting.option, **options)


def _help(setting: Setting) -> str:
    plain = isinstance(setting.default, (int, float, str, os.PathLike)) and not isinstance(setting.default, bool)
    known = f" [{setting.default}]" if plain and not setting.secret else ""
    return f"{setting.help}{known} ({setting.variable})".replace("%", "%%")


def check_engine(name: str | None) -> str:
    """The name of an installed engine, or a BadSetting that lists what there is."""
    known = sorted({entry.name for entry in importlib.metadata.entry_points(group=ENGINES_GROUP)})
    if name is None:
        raise BadSetting("no engine is named", field="--engine", fix=f"--engine with one of {', '.join(known)}")
    if name not in known:
        raise BadSetting(
            f"there is no engine {name[:64]!r}", field="--engine", fix=f"use one of {', '.join(known) or 'none'}"
        )
    return name
