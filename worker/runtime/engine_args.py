"""An engine's own arguments, as `--engine-arg key=value` and a YAML file (`--engine-args-file`) give them.

Each is a key with `_` and a text, which the engine parses: a file's value is what one would type on the command line,
lists and maps as JSON.
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
    def __init__(self, given: Mapping[str, str], file: Path | None = None) -> None:
        """`given` wins over the file. A file that can't be used is an InvalidRequest."""
        own = {_plain(key): text for key, text in given.items()}
        read = {} if file is None else _read(file)
        self._file = file
        self._of_file = read.keys() - own.keys()
        self.texts = {key: read[key] for key in read if key in self._of_file} | own
        """The given ones last: of two names that an engine has for one thing, it takes the later."""

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """An engine's refusal of an argument says that it came from the file."""
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
    import yaml  # with the extra `worker`; whoever gives no file needs none

    try:
        loader = yaml.SafeLoader(file.read_bytes())
        try:
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                raise _refused(file, "no map of arguments", "write one `key: value` in a line")
            items = [
                (loader.construct_object(key), loader.construct_object(value, deep=True))
                for key, value in root.value
            ]
        finally:
            loader.dispose()
    except OSError as error:
        raise _refused(file, f"can't be read: {error.strerror}", "name a file that this user can read") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
        raise _refused(file, f"not YAML: {error}", "write one `key: value` in a line") from error
    texts: dict[str, str] = {}
    for name, value in items:
        if not isinstance(name, str):
            raise _refused(
                file, f"{name!r} is no name of an argument", "write it as the engine's command line does"
            )
        key = _plain(name)
        if key in texts:
            raise _refused(file, f"{key} is there twice", "leave one out", key[:64])
        texts[key] = _text(file, key, value)
    return texts


def _text(file: Path, key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise _refused(file, f"{key[:64]} has no value", "give one, or leave the line out", key[:64])
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # a date, bytes, NaN, or what holds itself
        raise _refused(
            file,
            f"{key[:64]} is {type(value).__name__}: {error}",
            "give a string, a number, true, false, a list or a map",
            key[:64],
        ) from error
