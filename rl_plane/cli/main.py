"""The command `rl-plane`. It needs the extra `cli`; each command loads what it runs."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_plane._util.extras import missing_module
from rl_plane.cli.output import BadSetting, error_line, note
from rl_plane.errors import PlaneError

if TYPE_CHECKING:
    import click

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_group() -> click.Group:
    """All commands. BadSetting and click's own errors come out of `main` as exceptions."""
    import click

    from rl_plane.cli import (
        follow_events,
        keys,
        publish,
        ready_command,
        replay_command,
        serve,
        steer,
        top,
        trace_command,
        up,
    )
    from rl_plane.cli.doctor import doctor_command
    from rl_plane.cli.explain import explain_command

    class OrderedGroup(click.Group):
        def list_commands(self, ctx: click.Context) -> list[str]:
            return list(self.commands)

    commands = [
        *up.commands(),
        *serve.commands(),
        *steer.commands(),
        *ready_command.commands(),
        *explain_command.commands(),
        *doctor_command.commands(),
        *top.commands(),
        *follow_events.commands(),
        *publish.commands(),
        *replay_command.commands(),
        *trace_command.commands(),
        *keys.commands(),
        serve.demo_command(),
    ]
    doc = "The control plane of a fleet of LLM inference engines. Each flag has a variable RL_PLANE_…."
    group = OrderedGroup("rl-plane", commands=commands, help=doc, no_args_is_help=False)
    return click.version_option(importlib.metadata.version("rl-plane"), message="rl-plane %(version)s")(group)


def run(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for an error, 2 for wrong usage, 130 after an interrupt."""
    try:
        import click
    except ModuleNotFoundError as error:
        note(error_line(missing_module(error)), "error")
        return EXIT_ERROR
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code: int = build_group().main(arguments, prog_name="rl-plane", standalone_mode=False)
        return code
    except BadSetting as error:
        note(error_line(error), "error")
        return EXIT_USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "rl-plane"
        note(error_line(BadSetting(error.format_message(), fix=f"see `{path} --help`")), "error")
        return EXIT_USAGE
    except PlaneError as error:
        note(error_line(error), "error")
        return EXIT_ERROR
    except (KeyboardInterrupt, click.Abort):
        note("rl-plane: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone. Python's own flush at exit must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(run())
