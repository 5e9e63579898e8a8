"""The command `rl-plane`. Needs nats-py, msgpack and pydantic only; each command loads what it runs."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence

import rl_plane.cli.publish as publish
import rl_plane.cli.serve as serve
import rl_plane.cli.steer as steer
import rl_plane.cli.up as up
from rl_plane._util.extras import missing_module
from rl_plane.cli.flags import Command, Parser
from rl_plane.cli.output import error_line, note, say_json
from rl_plane.cli.settings import BadSetting
from rl_plane.errors import PlaneError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_parser() -> Parser:
    parser = Parser(
        prog="rl-plane",
        description="The control plane of a fleet of LLM inference engines. Each flag has a variable RL_PLANE_….",
    )
    version = importlib.metadata.version("rl-plane")
    parser.add_argument("--version", action="version", version=f"rl-plane {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    up.add_to(commands)
    serve.add_to(commands)
    steer.add_to(commands)
    publish.add_to(commands)
    serve.add_demo_to(commands)
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for an error, 2 for wrong usage, 130 when interrupted."""
    as_json = False
    try:
        command = Command(build_parser().parse_args(argv))
        as_json = bool(command.values.get("json"))
        return command.handler(command)
    except BadSetting as error:
        note(error_line(error))
        return EXIT_USAGE
    except PlaneError as error:
        return _failed(error, as_json)
    except ModuleNotFoundError as error:
        return _failed(missing_module(error), as_json)
    except KeyboardInterrupt:
        note("rl-plane: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who read our output has gone; Python's own flush at exit must not complain of it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:
        if error.filename is None:
            raise
        words = f"{error.filename}: {error.strerror}"
        return _failed(PlaneError(words, fix="can this user read and write there?"), as_json)


def _failed(error: PlaneError, as_json: bool) -> int:
    if as_json:
        say_json({"status": "error", "error": error.to_wire()})
    note(error_line(error))
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(run())
