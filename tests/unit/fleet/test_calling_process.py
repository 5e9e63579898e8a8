"""The name of a caller, as its process states it in a header."""

from __future__ import annotations

import os

import pytest

from rl_plane.fleet.calling_process import MAX_CHARS, caller_over_http, this_process


def test_a_process_names_its_program_host_and_id() -> None:
    name = this_process()
    assert name.endswith(f":{os.getpid()}")
    assert caller_over_http(name, "10.0.0.7") == f"{name} at 10.0.0.7"


@pytest.mark.parametrize("named", [None, "", "a\nb", "a\tb", "é", " a", "x" * (MAX_CHARS + 1)])
def test_a_header_that_is_no_short_line_is_ignored(named: str | None) -> None:
    assert caller_over_http(named, "10.0.0.7") == "10.0.0.7"
