"""Makes the default model from a seed, in the user's cache.

`python -m rl_plane.cli.models ENGINE…` makes it in a process of its own, which alone loads torch, and prints the
directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from rl_plane._util.extras import missing_module
from rl_plane.cli.output import error_line, note, say
from rl_plane.errors import PlaneError

SEED = 0


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rl_plane"


def default_model(engines: Iterable[str]) -> Path:
    """One model for all engines, because a fleet serves one policy. The fake engine reads any model."""
    if set(engines) == {"fake"}:
        from worker.engines.fake.adapter import make_fake_model

        path = cache_dir() / "fake-model"
        # A worker that loads it now must not see its files change.
        return path if (path / "model.safetensors").exists() else make_fake_model(path, seed=SEED)
    from worker.testing.tiny_model import make_tiny_model

    try:
        return make_tiny_model(cache_dir() / "tiny-qwen3", seed=SEED)
    except FileExistsError as error:
        raise PlaneError(
            f"{cache_dir() / 'tiny-qwen3'} holds another model", fix="remove it, or give --model"
        ) from error


def main(engines: list[str]) -> int:
    try:
        say(str(default_model(engines)))
    except ModuleNotFoundError as error:
        note(error_line(missing_module(error)))
        return 1
    except PlaneError as error:
        note(error_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
