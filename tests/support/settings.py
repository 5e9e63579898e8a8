"""Reads settings of the command line as a command does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import click

from rl_plane.cli.main import build_group
from rl_plane.cli.settings import SETTINGS


def values_of(names: Iterable[str], argv: Sequence[str] = (), **environ: str) -> dict[str, Any]:
    """The values of these settings, given by flags and by nothing else in the environment."""
    command = click.Command("x", params=[SETTINGS[name] for name in names])
    with mock.patch.dict(os.environ, environ, clear=True):
        return command.make_context("x", list(argv)).params


def command_values(argv: Sequence[str]) -> dict[str, Any]:
    """The values of a whole command line, with the variables of this process."""
    group = build_group()
    name, command, rest = group.resolve_command(click.Context(group), list(argv))
    assert command is not None
    return command.make_context(name, rest).params
