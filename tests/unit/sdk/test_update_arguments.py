"""The arguments of an update may be models or mappings: both give one body, and the error of a wrong one names it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from rl_plane.errors import InvalidRequest
from rl_plane.fleet.fleet_method import AsyncRun
from rl_plane.fleet.fleet_methods import FleetMethods
from rl_plane.protocol.update_requests import BaseTarget, LoraTarget, Transport, UpdatePolicy
from rl_plane.publish.publisher import WeightPublisher

FILES = {"backend": "filesystem", "path": "/w"}


class Recorder(FleetMethods, AsyncRun):
    """A client that returns the body of each call."""

    async def run(
        self, op: str, body: dict[str, Any] | None = None, request_id: str = "", *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        return body or {}


async def sent(transport: Any = FILES, **arguments: Any) -> dict[str, Any]:
    body: Any = await Recorder().update_weights(transport, **arguments)
    prepared: Any = await Recorder().prepare_weights_update(transport, **arguments)
    assert prepared == body
    return dict(body)


@pytest.mark.parametrize(
    ("name", "model", "mapping", "field"),
    [
        ("transport", Transport.model_validate(FILES), FILES, FILES),
        ("policy", UpdatePolicy(barrier="rolling"), {"barrier": "rolling"}, {"barrier": "rolling"}),
        ("policy", UpdatePolicy(), {}, {}),
        (
            "target",
            BaseTarget(adapters="drop"),
            {"kind": "base", "adapters": "drop"},
            {"kind": "base", "adapters": "drop"},
        ),
        (
            "target",
            LoraTarget(kind="lora", op="load", name="a"),
            {"kind": "lora", "op": "load", "name": "a"},
            {"kind": "lora", "op": "load", "name": "a"},
        ),
    ],
)
async def test_a_model_and_a_mapping_give_one_field(
    name: str, model: Any, mapping: dict[str, Any], field: dict[str, Any]
) -> None:
    for given in (model, mapping, MappingProxyType(mapping)):
        assert (await sent(**{name: given}))[name] == field


async def test_an_argument_that_is_left_out_is_no_field() -> None:
    assert not {"target", "policy"} & (await sent()).keys()
    body: Any = await Recorder().rollback("step_1", policy={"keep_pause": True})
    assert body == {"rollback": {"label": "step_1"}, "policy": {"keep_pause": True}}


WRONG_POLICIES = [
    ("rolling", "policy", "send a map"),
    (LoraTarget(kind="lora", op="load", name="a"), "policy", "send a map"),
    ({"barier": "rolling"}, "policy.barier", "leave it out"),
    ({"min_ready": 0}, "policy.min_ready", "give 1 or more"),
]


@pytest.mark.parametrize(
    ("name", "value", "field", "fix"),
    [
        *(("policy", *one) for one in WRONG_POLICIES),
        ("target", "lora", "target", "send a map"),
        ("target", {"kind": "lora", "op": "load"}, "target.name", "add it"),
        ("transport", "nixl", "transport", "send a map"),
        ("transport", {"path": "/w"}, "transport.backend", "add it"),
    ],
)
async def test_a_wrong_argument_names_its_field(name: str, value: Any, field: str, fix: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await sent(**{name: value})
    assert (error.value.facts["field"], error.value.facts["fix"]) == (field, fix)


def made(policy: Any) -> WeightPublisher:
    return WeightPublisher({}, "http://127.0.0.1:1", policy=policy, rank=1)


@pytest.mark.parametrize(
    "policy", [UpdatePolicy(barrier="rolling"), MappingProxyType({"barrier": "rolling"}), None]
)
def test_a_publisher_takes_both(policy: Any) -> None:
    made(policy).close()


@pytest.mark.parametrize(("policy", "field", "fix"), WRONG_POLICIES)
def test_a_publisher_refuses_a_wrong_policy_when_it_is_made(policy: Any, field: str, fix: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        made(policy)
    assert (error.value.facts["field"], error.value.facts["fix"]) == (field, fix)
