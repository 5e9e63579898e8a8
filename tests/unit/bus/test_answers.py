"""Answers go to inboxes alone, because NATS does not check the subject that a message names for its answer."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from nats.aio.msg import Msg

from rl_plane.bus.answers import answer_subject
from tests.support.paths import ROOT

PRODUCT = ("rl_plane", "worker", "frontend")
ANSWERS = "rl_plane/bus/answers.py"
MESSAGES = ("message", "msg")
"""The names that the product gives to a message of NATS."""


def asked(reply: str) -> str:
    client: Any = None
    return answer_subject(Msg(client, "demo.engine.read.0", reply=reply, data=b"{}"))


@pytest.mark.parametrize("inbox", ["_INBOX.abc.1", "_INBOX.UABC.abc.1"])
def test_an_inbox_gets_the_answer(inbox: str) -> None:
    assert asked(inbox) == inbox


@pytest.mark.parametrize(
    "subject",
    ["", "$KV.rlp_demo_engine_state.lock", "rlsys.disconnect", "$JS.API.STREAM.PURGE.x", "_INBOX", "_INBOXES.a"],
)
def test_another_subject_gets_no_answer(subject: str) -> None:
    assert asked(subject) == ""


def test_no_other_module_reads_the_subject_that_a_message_names_for_its_answer() -> None:
    found = []
    for package in PRODUCT:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("reply", "respond")
                    and isinstance(node.value, ast.Name)
                    and node.value.id in MESSAGES
                ):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert [place for place in found if not place.startswith(ANSWERS)] == [], "use answer_subject there"
    assert found
