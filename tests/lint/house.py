"""Finds forbidden openings of docstrings and of names of tests, names that the product uses twice, and tests that
import tests.

A docstring is a sentence that says what the thing is or does. An opening such as "Of" or "By which" makes a fragment,
which a reader must complete from the name and the body.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.lint.parsed import parsed

FORBIDDEN = (
    "as", "by what", "by which", "how", "in which", "likewise", "of", "that", "the same", "those", "to whom", "what",
    "when", "where", "which", "who", "whoever", "whom", "whose", "with what", "with which",
)  # fmt: skip
FORBIDDEN_IN_TESTS = (*FORBIDDEN, "also", "and", "but", "by", "nor", "or", "so that")
"""These continue the name of a test, of which a failure's report shows one without the other."""

FORBIDDEN_IN_NAMES = ("as", "how", "likewise", "of", "those", "what", "when", "where")
"""The name of a test begins with its subject. These words begin a clause without one."""

PRODUCT = ("rl_plane/", "worker/", "frontend/")

ROLES = {
    "__init__", "__main__", "adapter", "args", "base", "config", "cpu_build", "fleet", "holder", "kept_kv", "logits",
    "main", "plugin", "processes", "receiver", "scorer", "seeds", "sender", "streams", "text_form", "wire",
}  # fmt: skip
"""A transport, an engine and a dialect are a folder each. Files with these names differ by their folder."""


def offences(root: Path) -> list[str]:
    """Returns one line per offence in the Python files that git tracks under `root`, sorted."""
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    files = [name for name in names.stdout.split() if (root / name).is_file()]
    blocks = {name: list(_blocks(parsed((root / name).read_text()))) for name in files}
    found = [line for name, nodes in blocks.items() for line in _openings(name, nodes)]
    found += [line for name, nodes in blocks.items() for line in _imports_of_tests(name, nodes)]
    found += [line for name, nodes in blocks.items() for line in _names_of_tests(name, nodes)]
    product = {name: nodes for name, nodes in blocks.items() if name.startswith(PRODUCT)}
    return sorted(found + _same_modules(product) + _same_classes(product))


def _opening(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:{'|'.join(words)})\b(?!-)", re.IGNORECASE)


def _openings(name: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    opening = _opening(FORBIDDEN_IN_TESTS if name.startswith("tests/") else FORBIDDEN)
    for line, text in _docstrings(nodes):
        if opening.match(text.lstrip("`*_ \n")):
            yield f"{name}:{line}: the docstring opens with {text.split()[0]!r}: say what the thing is or does"


def _imports_of_tests(name: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            paths = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(re.match(r"tests\..*\btest_\w+$", path) for path in paths):
                yield f"{name}:{node.lineno}: it imports a test file: what tests share belongs into tests/support"


def _names_of_tests(name: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    opening = re.compile(rf"test_(?:{'|'.join(FORBIDDEN_IN_NAMES)})_")
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and opening.match(node.name):
            yield f"{name}:{node.lineno}: {node.name} has no subject: name the thing that the test is about"


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring, also of those after a constant or a field."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node.lineno, text


def _blocks(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields all statements, handlers and cases. Most nodes of a tree are in expressions, which this doesn't enter."""
    pending: list[ast.AST] = [tree]
    while pending:
        inner = [
            node
            for node in ast.iter_child_nodes(pending.pop())
            if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case))
        ]
        yield from inner
        pending += inner


def _same_modules(files: Iterable[str]) -> list[str]:
    places = defaultdict(list)
    for name in files:
        places[Path(name).stem].append(name)
    return [
        f"{name}:1: a module of this name is also {', '.join(other for other in names if other != name)}"
        for stem, names in places.items()
        if stem not in ROLES and len(names) > 1
        for name in names
    ]


def _same_classes(blocks: dict[str, list[ast.AST]]) -> list[str]:
    """Compares private and inner classes too, without underscores: a reader who searches for a name finds all classes
    that have it."""
    places = defaultdict(list)
    for name, nodes in blocks.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append((f"{name}:{node.lineno}", node.name))
    return [
        f"{place}: a class {name} is also in {', '.join(other for other, _ in found if other != place)}"
        for found in places.values()
        if len(found) > 1
        for place, name in found
    ]
