"""Runs `rl-plane` with workers that a test can hold at a phase boundary, as `tests.support.phase_hooks` says."""

from __future__ import annotations

import sys

from rl_plane.cli.main import run
from tests.support import phase_hooks

if __name__ == "__main__":
    phase_hooks.install()
    sys.exit(run())
