"""The check of the repository's language and names finds what it should, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lint.house import offences

GOOD = '''"""Moves weights."""

LIMIT = 3
"""The number of retries."""


class Mover:
    """Moves one version. What it moves is in the manifest."""
'''

BAD = '''"""What moves weights."""

LIMIT = 3
"""Of the retries."""


class Mover:
    """Likewise."""
'''


def _offences(root: Path, **files: str) -> list[str]:
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return offences(root)


def test_a_docstring_that_is_a_fragment_is_found(tmp_path: Path) -> None:
    found = _offences(tmp_path, rl_plane__mover=BAD, tests__helper=BAD)
    assert [line.split(": ")[0] for line in found] == [
        f"{name}:{line}" for name in ("rl_plane/mover.py", "tests/helper.py") for line in (1, 4, 8)
    ]


def test_a_docstring_that_continues_the_name_of_its_test_is_found(tmp_path: Path) -> None:
    found = _offences(
        tmp_path,
        rl_plane__mover='"""By default, moves weights."""\n',
        tests__test_mover="".join(
            f'"""{word} without a trainer."""\n' for word in ("By files", "Also", "So that", "Nor")
        ),
        tests__test_other='"""A byproduct is bytes and no test. So many are moved."""\n"""Andean weights move."""\n',
    )
    assert [line.split(": ")[0] for line in found] == [f"tests/test_mover.py:{line}" for line in (1, 2, 3, 4)]


def test_sentences_and_different_names_are_no_offence(tmp_path: Path) -> None:
    assert _offences(tmp_path, rl_plane__mover=GOOD, tests__mover=GOOD) == []


def test_a_name_that_is_used_twice_is_found(tmp_path: Path) -> None:
    found = _offences(tmp_path, rl_plane__mover=GOOD, worker__mover=GOOD)
    assert len(found) == 4
    assert "rl_plane/mover.py:1: a module of this name is also worker/mover.py" in found
    assert "worker/mover.py:7: a class Mover is also in rl_plane/mover.py:7" in found


def test_a_private_class_that_the_product_has_twice_is_found(tmp_path: Path) -> None:
    private = GOOD.replace("class Mover", "class _Mover")
    found = _offences(tmp_path, rl_plane__mover=private, worker__other=private, tests__helper=private)
    assert found == [
        "rl_plane/mover.py:7: a class _Mover is also in worker/other.py:7",
        "worker/other.py:7: a class _Mover is also in rl_plane/mover.py:7",
    ]


def test_a_private_or_inner_twin_of_a_class_is_found(tmp_path: Path) -> None:
    inner = "def mover() -> type:\n    class Mover: ...\n\n    return Mover\n"
    private = GOOD.replace("class Mover", "class _Mover")
    found = _offences(tmp_path, rl_plane__mover=GOOD, worker__other=private, frontend__third=inner)
    assert found == [
        "frontend/third.py:2: a class Mover is also in rl_plane/mover.py:7, worker/other.py:7",
        "rl_plane/mover.py:7: a class Mover is also in frontend/third.py:2, worker/other.py:7",
        "worker/other.py:7: a class _Mover is also in frontend/third.py:2, rl_plane/mover.py:7",
    ]


def test_a_file_that_has_the_same_part_in_each_folder_may_have_the_same_name(tmp_path: Path) -> None:
    assert _offences(tmp_path, rl_plane__ipc__sender=GOOD, rl_plane__nixl__sender="") == []


def test_a_test_that_imports_a_test_is_found(tmp_path: Path) -> None:
    imports = "from tests.fleet.test_updates import update\nfrom tests.support.faults import update\n"
    found = _offences(tmp_path, tests__fleet__test_other=imports, tests__fleet__test_updates="")
    assert [line.split(": ")[0] for line in found] == ["tests/fleet/test_other.py:1"]


def test_a_name_of_a_test_without_a_subject_is_found(tmp_path: Path) -> None:
    named = "def test_what_is_sent_arrives() -> None: ...\n\n\nclass TestMover:\n"
    named += "    async def test_where_it_goes(self) -> None: ...\n"
    fine = "def test_weights_arrive_where_they_are_sent() -> None: ...\ndef test_offers_expire() -> None: ...\n"
    found = _offences(tmp_path, tests__test_mover=named, tests__test_other=fine)
    assert [line.split(" has")[0] for line in found] == [
        "tests/test_mover.py:1: test_what_is_sent_arrives",
        "tests/test_mover.py:5: test_where_it_goes",
    ]
