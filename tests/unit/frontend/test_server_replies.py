"""The JSON and the headers of replies and errors over HTTP."""

from __future__ import annotations

import pytest

from frontend.server.replies import error_body, error_response, to_json
from rl_plane.errors import EngineDied, NoWorkers, Unauthorized, Unavailable


def test_a_reply_never_has_nan() -> None:
    value = {"a": float("nan"), "b": [float("-inf"), 1.5], 3: b"\x01", "t": (1, True, None)}
    assert to_json(value) == b'{"a":null,"b":[null,1.5],"3":"01","t":[1,true,null]}'


def test_an_error_has_its_rows_where_a_reply_has_them() -> None:
    error = NoWorkers("none", field="workers", workers=[], epoch=3, fingerprint="f", elapsed_s=9.0)
    assert error_body(error, 0.5) == {
        "status": "error",
        "error": {"code": "no_workers", "message": "none", "field": "workers"},
        "workers": [],
        "epoch": 3,
        "fingerprint": "f",
        "elapsed_s": 0.5,
    }


@pytest.mark.parametrize(("wait_s", "header"), [(None, "1"), (0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_a_503_says_when_to_try_again(wait_s: float | None, header: str) -> None:
    response = error_response(Unavailable("not now", retry_after_s=wait_s), 0.0)
    assert (response.status_code, response.headers["retry-after"]) == (503, header)
    assert response.headers["content-length"] == str(len(response.body))


def test_the_503_of_a_dead_engine_says_when_to_retry() -> None:
    response = error_response(EngineDied("its process ended"), 0.0)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_401_says_how_to_authenticate() -> None:
    assert error_response(Unauthorized("no"), 0.0).headers["www-authenticate"] == "Bearer"
