"""Reads an engine's own arguments from `--engine-arg key=value` and from a YAML file (`--engine-args-file`).

Each argument is a key with `_` and a text, which the engine parses. The value in a file is the text of the command
line; lists and maps become JSON.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_plane.errors import InvalidRequest

FIELD = "engine_args_file"


class EngineArguments:
    """The arguments of one engine. `given` wins over the file. InvalidRequest for a file that can't be used."""

    def __init__(self, given: Mapping[str, str], file: Path | None = None) -> None:
        own = {_plain(key): text for key, text in given.items()}
        read = {} if file is None else _read(file)
        self._file = file
        self._of_file = read.keys() - own.keys()
        self.texts = {key: read[key] for key in read if key in self._of_file} | own
        """Key → text. The given ones come last: an engine that has two names for one argument takes the later one."""

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Names the file in an engine's refusal of an argument that came from it."""
        try:
            yield
        except InvalidRequest as error:
            kind, _, key = str(error.facts.get("field", "")).partition(".")
            if kind != "engine_arg" or key[:64] not in {name[:64] for name in self._of_file}:
                raise
            raise _refused(self._file, error.message, str(error.facts.get("fix", "correct it")), key) from error


def _plain(key: str) -> str:
    return key.replace("-", "_")


def _refused(file: Path | None, why: str, fix: str, key: str = "") -> InvalidRequest:
    return InvalidRequest(f"{file}: {why}", field=f"{FIELD}.{key}" if key else FIELD, fix=fix)


def _read(file: Path) -> dict[str, str]:
    import yaml  # part of the extra `worker`; only a file needs it

    try:
        loader = yaml.SafeLoader(file.read_bytes())
        try:
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                raise _refused(file, "not a map of arguments", "write one `key: value` in a line")
            items = [
                (loader.construct_object(key), loader.construct_object(value, deep=True))
                for key, value in root.value
            ]
        finally:
            loader.dispose()
    except OSError as error:
        raise _refused(file, f"can't be read: {error.strerror}", "name a file that this user can read") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise _refused(file, f"not YAML: {error}", "write one `key: value` in a line") from error
    texts: dict[str, str] = {}
    for name, value in items:
        if not isinstance(name, str):
            raise _refused(
                file, f"{name!r} is not the name of an argument", "write it as the engine's command line does"
            )
        key = _plain(name)
        if key in texts:
            raise _refused(file, f"{key} is given twice", "leave one out", key[:64])
        texts[key] = _text(file, key, value)
    return texts


def _text(file: Path, key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise _refused(file, f"{key[:64]} has no value", "give one, or leave the line out", key[:64])
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # a date, bytes, NaN, or a value that contains itself
        raise _refused(
            file,
            f"{key[:64]} is {type(value).__name__}: {error}",
            "give a string, a number, true, false, a list or a map",
            key[:64],
        ) from error
