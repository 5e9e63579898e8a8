"""SGLang's names of the pauses: said in requests alone, with one meaning on every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.client import RlClient
from rl_plane.errors import InvalidRequest
from rl_plane.protocol import update_requests, validation, worker_ops
from rl_plane.protocol.fleet_ops import FLEET_OPS
from tests.support.fleet_updates import states, update_of

if TYPE_CHECKING:
    from tests.conftest import Plane

SOURCE = {"transport": {"backend": "filesystem", "path": "/x"}}
CALL = FLEET_OPS["pause"].request


@pytest.mark.parametrize("model", [worker_ops.Pause, CALL])
@pytest.mark.parametrize(
    ("body", "clear_cache"),
    [
        ({"mode": "retract"}, True),
        ({"mode": "retract", "clear_cache": True}, True),
        ({"mode": "retract", "clear_cache": "true"}, True),  # of a query
        ({"mode": "in_place"}, False),
        ({"mode": "in_place", "clear_cache": "false"}, False),
    ],
)
def test_a_pause_is_keep_with_or_without_the_cache(
    model: type[worker_ops.Pause], body: dict[str, Any], clear_cache: bool
) -> None:
    pause = model.model_validate({**body, "lease_s": 7})
    wanted = {"mode": "keep", "clear_cache": clear_cache, "lease_s": 7.0}
    assert pause.model_dump(include=set(wanted), exclude_unset=True) == wanted, "workers get that name"


@pytest.mark.parametrize(("word", "kv"), [("retract", "recompute"), ("in_place", "keep")])
def test_the_pause_of_an_update_becomes_keep_and_decides_its_kv(word: str, kv: str) -> None:
    for model in (update_requests.UpdateCall, update_requests.UpdateWeights):
        policy = model.model_validate({**SOURCE, "policy": {"pause_mode": word}}).policy
        assert (policy.pause_mode, policy.kv) == ("keep", kv)
        other = "keep" if kv == "recompute" else "recompute"
        with pytest.raises(InvalidRequest) as caught:
            model.model_validate({**SOURCE, "policy": {"pause_mode": word, "kv": other}})
        assert caught.value.facts["field"] == "policy.kv"
        assert word in caught.value.message


@pytest.mark.parametrize("model", [worker_ops.Pause, CALL])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"mode": "retract", "clear_cache": False}, "clear_cache"),
        ({"mode": "retract", "clear_cache": "false"}, "clear_cache"),
        ({"mode": "in_place", "clear_cache": True}, "clear_cache"),
        ({"mode": "in_place", "clear_cache": "perhaps"}, "clear_cache"),
        ({"mode": "in_place", "clear_cache": None}, "clear_cache"),
        ({"mode": "in place"}, "mode"),
        ({"mode": ["in_place"]}, "mode"),
        ({"mode": None}, "mode"),
    ],
)
def test_a_contradiction_is_refused_by_name(
    model: type[worker_ops.Pause], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.parse_body(model, body)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


def test_an_adapters_own_modes_are_three() -> None:
    """A worker's requests come from the plane, which has no other names."""
    with pytest.raises(InvalidRequest, match="pause_mode"):
        validation.parse_body(
            update_requests.ReceiveRequest, {**SOURCE, "update_id": "u", "label": "l", "pause_mode": "retract"}
        )


async def test_a_fleet_pauses_by_sglangs_names(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn()

    for mode, flushed in (("retract", True), ("in_place", False)):
        reply = await client.run("pause", {"mode": mode})
        assert reply["workers"][0]["cache_flushed"] is flushed
        assert await mode_now(client) == "keep"
        await client.resume()
        row = await client.call(worker.instance_id, "pause", {"mode": mode})
        assert row.body["cache_flushed"] is flushed
        assert await mode_now(client) == "keep"
        await client.resume()


@pytest.mark.parametrize("word", ["retract", "in_place"])
async def test_an_update_flushes_whichever_name_it_has(plane: Plane, word: str) -> None:
    client = await plane.client()
    plane.spawn()
    reply = await client.run("update_weights", update_of(plane.model(1), "one", pause_mode=word, keep_pause=True))
    assert [row["cache_flushed"] for row in reply["workers"]] == [True]
    assert await mode_now(client) == "keep"


async def mode_now(client: RlClient) -> str | None:
    [state] = (await states(client)).values()
    mode: str | None = state["pause"]["mode"]
    return mode
