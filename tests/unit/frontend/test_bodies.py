"""The fields of a facade call, from its query and its body."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from frontend.server.bodies import MAX_BODY_BYTES, LargeBodyPlace, list_fields, merge_query, read_hashed
from rl_plane.errors import InvalidRequest
from rl_plane.protocol.fleet_ops import FLEET_OPS


def test_lists_come_by_comma_or_repeated() -> None:
    lists = list_fields(FLEET_OPS["release_memory"].request)
    assert {"workers", "component", "tags"} <= lists
    query = [("tags", "weights,kv_cache"), ("workers", "a"), ("workers", "b"), ("epoch", "3")]
    assert merge_query(query, {}, lists) == {
        "tags": ["weights", "kv_cache"],
        "workers": ["a", "b"],
        "epoch": "3",
    }


def test_query_and_body_may_agree_but_not_differ() -> None:
    lists = frozenset({"workers"})
    body = {"mode": "keep", "clear_cache": True, "lease_s": 5, "workers": ["a"]}
    query = [("mode", "keep"), ("clear_cache", "true"), ("lease_s", "5"), ("workers", "a")]
    assert merge_query(query, body, lists) == body
    for key, text in (("mode", "abort"), ("clear_cache", "false"), ("lease_s", "6"), ("workers", "b")):
        with pytest.raises(InvalidRequest) as caught:
            merge_query([(key, text)], body, lists)
        assert caught.value.facts["field"] == key
    with pytest.raises(InvalidRequest):
        merge_query([("mode", "keep"), ("mode", "abort")], {}, lists)


@pytest.mark.parametrize(
    ("body", "is_null"),
    [(b"null", True), (b" null \n", True), (b"null    {}", False), (b"null    trailing", False)],
)
async def test_only_a_body_of_null_alone_is_an_empty_object(body: bytes, is_null: bool) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with LargeBodyPlace(asyncio.Semaphore()) as place:
        if is_null:
            assert (await read_hashed(request, MAX_BODY_BYTES, place))[0] == {}
        else:
            with pytest.raises(InvalidRequest, match="JSON"):
                await read_hashed(request, MAX_BODY_BYTES, place)
