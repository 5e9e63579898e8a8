"""The check of banned phrases finds them in texts, and not in code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lint.phrases import too_many_phrases


def _found(root: Path, files: dict[str, str], limit: int = 0) -> list[str]:
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return [line.partition(" hides")[0] for line in too_many_phrases(root, ("docs", "worker"), limit)]


@pytest.mark.parametrize(
    "text",
    [
        '"""Sends the weights to those that listen."""\n',
        "place = 1  # the one that is free\n",
        "# The update waits for those\n# that listen.\n",
        'words = "the update " + "goes on"\n',
        'words = f"{1} workers: those " f"that listen"\n',
        '"""Nobody listens."""\n',
        '"""The lock is\nheld."""\n',
    ],
)
def test_a_banned_phrase_in_a_text_of_python_is_found(tmp_path: Path, text: str) -> None:
    (line, count) = _found(tmp_path, {"worker/mover.py": text})
    assert line.startswith("worker/mover.py:1: ")
    assert count == "docs:1: these are 1 banned phrases, and at most 0 are allowed"


def test_a_banned_phrase_in_a_page_is_found_at_its_line(tmp_path: Path) -> None:
    found = _found(tmp_path, {"docs/page.md": "# Page\n\n| It is\ntold | those\nwho listen\n"})
    assert found[:-1] == ["docs/page.md:3: 'is told'", "docs/page.md:4: 'those who'"]


def test_code_and_other_words_are_no_offence(tmp_path: Path) -> None:
    code = 'held = nobody = 1\nfound = held is nobody\n\n\ndef kept(held: int) -> bool:\n    """Is one of a kind."""\n'
    code += '    return kept is held  # those workers that listen\nwords = {"one": "that"}, "those", that\n'
    assert _found(tmp_path, {"worker/mover.py": code, "docs/page.md": "One worker that goes one step on.\n"}) == []


def test_a_folder_that_is_not_listed_is_left_out(tmp_path: Path) -> None:
    assert _found(tmp_path, {"tests/page.md": "Nobody listens.\n"}) == []


def test_a_limit_allows_so_many(tmp_path: Path) -> None:
    pages = {"docs/page.md": "Nobody listens. It goes on.\n"}
    assert _found(tmp_path, pages, limit=2) == []
    assert len(_found(tmp_path, pages, limit=1)) == 3
