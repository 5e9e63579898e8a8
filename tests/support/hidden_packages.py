"""Hides what is installed from this process, as if only some locks had been installed."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions

from tests.support.paths import ROOT


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


def hide_all_but(*locks: str) -> None:
    """From now on, only the packages of these files of deploy/locks can be imported. A module that is already
    imported stays."""
    lines = [
        line for lock in locks for line in (ROOT / "deploy" / "locks" / f"{lock}.txt").read_text().splitlines()
    ]
    kept = {_plain(line.partition("==")[0]) for line in lines if "==" in line} | {"rl-plane"}
    for module, packages in packages_distributions().items():
        if kept.isdisjoint(map(_plain, packages)):
            sys.modules.setdefault(module, None)  # type: ignore[arg-type]  # Python's own way to refuse an import
