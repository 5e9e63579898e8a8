"""Writes rl_plane/fleet/blocking_fleet_methods.py from fleet_methods.py: `python docs/generate_blocking_methods.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "rl_plane" / "fleet"
SOURCE, MADE = FOLDER / "fleet_methods.py", FOLDER / "blocking_fleet_methods.py"
HEADING = '''"""The fleet's ops as typed methods that block. docs/generate_blocking_methods.py makes this file from
`fleet_methods.py`.
"""
'''


def blocking(source: str) -> str:
    """The source of the asynchronous methods as the source of blocking ones."""
    code = HEADING + source.split('"""\n', 1)[1]
    # The helpers at the end are the same functions.
    methods, helpers = re.split(r"\n\n\n(?=def _given)", code, maxsplit=1)
    names = ", ".join(re.findall(r"^def (\w+)", helpers, re.MULTILINE))
    shared = f"from rl_plane.fleet.fleet_methods import Memory, PauseWord, {names}\n"
    methods = methods.replace("from rl_plane.", shared + "from rl_plane.", 1)
    methods = re.sub(r"^(PauseWord|Memory) = .*\n", "", methods, flags=re.MULTILINE)
    methods = methods.replace("class FleetMethods", "class BlockingFleetMethods")
    methods = methods.replace("async def ", "def ").replace("await ", "")
    ruff = [sys.executable, "-m", "ruff"]
    for step in (["check", "--quiet", "--fix"], ["format"]):
        command = [*ruff, *step, "--stdin-filename", str(MADE), "-"]
        methods = subprocess.run(command, input=methods, capture_output=True, text=True, check=True).stdout
    return methods


if __name__ == "__main__":
    MADE.write_text(blocking(SOURCE.read_text()))
