"""The version of the installed rl-plane."""

from __future__ import annotations

import importlib.metadata
from functools import cache


@cache
def own_version() -> str:
    """The version, or `unknown` if it runs from files that no installer has put there."""
    try:
        return importlib.metadata.version("rl-plane")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
