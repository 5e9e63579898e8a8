"""Calls on the fleet subject: their envelope becomes a body."""

from __future__ import annotations

import pytest

from frontend.facade.nats_service import call_body
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.envelope import Request


def test_the_envelopes_selection_goes_into_the_body() -> None:
    request = Request("pause", {"mode": "keep"}, targets=("a",), epoch=4, fingerprint="f")
    assert call_body(request) == {"mode": "keep", "workers": ["a"], "epoch": 4, "fingerprint": "f"}
    assert call_body(Request("state", {"workers": ["a"]}, targets=("a",))) == {"workers": ["a"]}


@pytest.mark.parametrize(
    "request_",
    [
        Request("state", {"workers": ["b"]}, targets=("a",)),
        Request("state", {"epoch": 1}, epoch=2),
        Request("pause", fence=3),
        Request("pause", incarnation="x"),
    ],
)
def test_an_envelope_that_contradicts_itself_is_refused(request_: Request) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call_body(request_)
    assert caught.value.facts["field"]
