"""Finds phrases that hide who does what, such as "those that", "goes on", "nobody" or "is kept".

A sentence names its subject and uses a plain verb instead: "the workers that listen", "continues", "no worker", "the
host agent stores". The check reads Markdown and scripts whole. In Python files it reads docstrings, comments and
messages, and no code.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

CHECKED = (
    "CONTRIBUTING.md", "Makefile", "README.md", "bench", "deploy", "docker-compose.yml", "docs", "examples",
    "frontend", "rl_plane", "tests", "worker", ":(exclude)tests/lint",
)  # fmt: skip
"""The files and folders that the check reads. The files of tests/lint name the phrases themselves."""

TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""The tokens that hold words. An f-string has tokens of its own from Python 3.12 on."""

LIMIT = 0
"""The number of banned phrases that there are. It may only fall."""

SUFFIXES = (".conf", ".html", ".js", ".md", ".py", ".sh", ".yml", "Makefile")

PHRASES = {
    "those (?:that|who|which|whose)": "name the things: `the workers that …`",
    "ones? (?:that|who|which|whose)": "name the thing: `a worker that …`",
    "(?:go|goes|going|went) on": "say `continues`",
    "(?:come|comes|coming|came) back": "say what happens: it reconnects, returns, is restored",
    "(?:nobody|somebody|whoever|whomever)": "name the process or the person",
    "(?:let|lets|letting) go": "say `releases` or `frees`",
    "(?:is|are) told": "say who tells it: `the coordinator tells the worker`",
    "(?:is|are) (?:kept|held)": "say who does it, with a plain verb: stores, holds, locks, pauses",
}
"""Each banned phrase, as a pattern whose words stand apart by one space, and what to write instead."""

_GAP = r'(?:[\s#"]|//|\bf")+'
"""The text between two words: spaces, the end of a line of a comment, or the end of a string and the next string."""

_BANNED = [
    (re.compile(rf"\b{phrase.replace(' ', _GAP)}\b(?!-)", re.IGNORECASE), fix) for phrase, fix in PHRASES.items()
]


def too_many_phrases(root: Path, checked: Sequence[str] = CHECKED, limit: int = LIMIT) -> list[str]:
    """Returns one line per banned phrase in the files that git tracks below `checked`, if there are more than
    `limit`."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *checked], cwd=root, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.splitlines() if name.endswith(SUFFIXES) and (root / name).is_file()]
    found = [line for name in sorted(names) for line in _phrases(name, (root / name).read_text())]
    if len(found) <= limit:
        return []
    return [*found, f"docs:1: these are {len(found)} banned phrases, and at most {limit} are allowed"]


def _phrases(name: str, text: str) -> Iterator[str]:
    if not any(banned.search(text) for banned, _ in _BANNED):
        return  # most files end here: to split one into tokens takes far longer
    if name.endswith(".py"):
        text = _words(text)
    hits = [(hit.start(), hit[0], fix) for banned, fix in _BANNED for hit in banned.finditer(text)]
    for start, phrase, fix in sorted(hits):
        line = text.count("\n", 0, start) + 1
        words = " ".join(re.sub(_GAP, " ", phrase).split())
        yield f"{name}:{line}: {words!r} hides who does what: {fix}"


def _words(source: str) -> str:
    """Returns the comments and strings of a module, each on its line. A semicolon stands for the code between them."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXTS:
            for number, part in enumerate(token.string.split("\n"), start=token.start[0] - 1):
                lines[number] += part
        elif token.string.strip():
            lines[token.start[0] - 1] += ";"
    return "\n".join(lines)
