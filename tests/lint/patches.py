"""Counts the places where tests replace names of the product or of a library. The number may fall, and must not rise.

A test that replaces a name of a module holds when callers see something else, and fails when the code is only arranged
anew. Most situations have a public cause: an argument, a real file or socket, a class of the test's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.lint.parsed import parsed

LIMIT = 160
"""The number of patches that there are. Lower it when you remove some. If several tests need a situation that has no
public cause, one helper in tests/support makes it. The helper is named after the situation."""
PATCHES = {
    f"{name}patch{kind}" for name in ("", "mock.", "unittest.mock.") for kind in ("", ".object", ".multiple")
}
"""The functions of `unittest.mock` that replace a name. `patch.dict` is not among them: it changes an environment."""


def too_many_patches(root: Path, limit: int = LIMIT) -> list[str]:
    """Returns one line per patch in the folder `tests` of `root`, sorted, if there are more than `limit`."""
    files = sorted((root / "tests").rglob("*.py"))
    found = [f"{path.relative_to(root)}:{line}: {what}" for path in files for line, what in _patches(path)]
    if len(found) <= limit:
        return []
    return [*found, f"tests:1: these are {len(found)} patches, and at most {limit} are allowed"]


def _patches(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the target of each patch of a file, in the order of the lines."""
    nodes = list(ast.walk(parsed(path.read_text())))
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    imported -= {
        node.arg for node in nodes if isinstance(node, ast.arg)
    }  # an imported fixture is a test's own object
    found = []
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr")):
                found.append((node.lineno, f"a name is patched: {ast.unparse(node)[:100]}"))
            case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), *_]) if name in imported:
                found.append((node.lineno, f"a name of {name} is patched"))
            case ast.Call(
                func=ast.Name(id="patch") | ast.Attribute(attr="patch" | "object" | "multiple") as function
            ) if ast.unparse(function) in PATCHES:
                found.append((node.lineno, f"a name is patched: {ast.unparse(node)[:100]}"))
            case ast.Assign(targets=targets):
                for target in targets:
                    replaced = ast.unparse(target)
                    if isinstance(target, ast.Attribute) and replaced.partition(".")[0] in imported:
                        found.append((node.lineno, f"an imported name is replaced: {replaced}"))
    yield from sorted(found)
