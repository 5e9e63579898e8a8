"""Installs a package of the repository's examples, as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

INSTALL_S = 120.0
"""The longest that pip may take on a busy machine."""


def install(package: Path, into: Path) -> None:
    """Does what `pip install PACKAGE` does, into the directory `into / "site"`."""
    copy = into / "source"  # setuptools builds in the tree that it is given
    copy.mkdir(parents=True)
    for one in package.iterdir():
        if one.is_file():
            (copy / one.name).write_bytes(one.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--disable-pip-version-check", "--target", str(into / "site"), str(copy)]
    subprocess.run(pip, check=True, capture_output=True, text=True, timeout=INSTALL_S)
