"""Counts the private names of other objects that tests use. The number may fall, and must not rise.

A test that reads or patches a private name fails when the product is only arranged anew, and passes when what callers
see is broken. Some are there all the same: a library may have no public name for what a test must see, and a fault may
have no public cause.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.lint.parsed import parsed

LIMIT = 78
"""The number of uses that there are. Lower it when you remove some. A new test uses the public method or its result, or
gives the product a constructor argument or a public property that other callers would want too."""
RULE = "SLF001"
"""Ruff's rule for a private attribute of another object. A `noqa` does not hide a use here."""


def too_many_private_names(root: Path, limit: int = LIMIT) -> list[str]:
    """Returns one line per use of a private name in the folder `tests` of `root`, sorted, if there are more than
    `limit`."""
    found = sorted([*_attributes(root), *_patches(root)])
    if len(found) <= limit:
        return []
    return [*found, f"tests:1: these are {len(found)} uses of private names, and at most {limit} are allowed"]


def _attributes(root: Path) -> Iterator[str]:
    command = f"ruff check --isolated --ignore-noqa --select {RULE} --output-format json tests".split()
    ran = subprocess.run([sys.executable, "-m", *command], cwd=root, capture_output=True, text=True)
    if ran.returncode not in (0, 1):  # 1: it has found some
        raise RuntimeError(f"ruff failed: {ran.stderr}")
    for one in json.loads(ran.stdout):
        name = Path(one["filename"]).relative_to(root.resolve())
        yield f"{name}:{one['location']['row']}: {one['message']}"


def _patches(root: Path) -> Iterator[str]:
    texts = ((path, path.read_text()) for path in (root / "tests").rglob("*.py"))
    for path, text in texts:
        if "setattr(" not in text:
            continue
        for node in ast.walk(parsed(text)):
            match node:
                case ast.Call(func=ast.Attribute(attr="setattr") | ast.Name(id="setattr"), args=args):
                    names = [one.value for one in args[:2] if isinstance(one, ast.Constant)]
                    name = str(names[0]).rpartition(".")[2] if names else ""  # of `module.name`, or of an object's
                    if name.startswith("_") and not name.startswith("__"):
                        yield f"{path.relative_to(root)}:{node.lineno}: a private name is patched: `{name}`"
