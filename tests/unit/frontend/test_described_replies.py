"""The OpenAPI document describes each op's answer by the type that the SDK's method of the same name returns."""

from __future__ import annotations

import typing
from typing import Any, NotRequired

import pytest

from frontend.server.api import Api, Operation
from frontend.server.shared_routes import NoFields
from rl_plane.fleet.fleet_methods import FleetMethods
from rl_plane.protocol.fleet_ops import FLEET_OPS, FleetOp
from tests.support.openapi_replies import described_reply, reply_faults

GENERAL = {"status", "epoch", "fingerprint", "elapsed_s", "workers"}
ROW = {"instance_id": "a", "incarnation": "b"}
ERROR = {"code": "worker_lost", "message": "it has left"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    api = Api("a fleet")
    for op in FLEET_OPS.values():
        endpoint: Any = None
        api.add(
            Operation(
                method=op.method,
                path=f"/v1/rl/{op.path}",
                endpoint=endpoint,
                name=op.name,
                summary=op.doc,
                tags=(),
                bodies=(NoFields,),
                replies=(op.reply,),
            )
        )
    return api.document()


@pytest.mark.parametrize("op", FLEET_OPS.values(), ids=FLEET_OPS)
def test_the_sdk_returns_the_reply_of_the_op_table(op: FleetOp) -> None:
    method: Any = getattr(FleetMethods, op.name)
    (reply,) = typing.get_args(typing.get_type_hints(method)["return"])
    assert reply is op.reply


@pytest.mark.parametrize("op", FLEET_OPS.values(), ids=FLEET_OPS)
def test_the_document_names_the_fields_of_each_op(op: FleetOp, document: dict[str, Any]) -> None:
    assert described_reply(document, op) == op.reply.__name__
    schema = document["components"]["schemas"][op.reply.__name__]
    fields = typing.get_type_hints(op.reply, include_extras=True)
    assert schema["properties"].keys() == fields.keys() >= GENERAL
    required = {name for name, kind in fields.items() if typing.get_origin(kind) is not NotRequired}
    assert set(schema["required"]) == required >= GENERAL


def test_a_field_is_described_in_words(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert "heal by themselves" in schemas["UpdateReply"]["properties"]["excluded"]["description"]
    assert "every worker serves" in schemas["FleetState"]["properties"]["applied_weight_version"]["description"]


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ({**ROW, "status": "ok", "pause_state": "paused", "cache_flushed": False}, True),
        ({**ROW, "status": "ok"}, False),
        ({**ROW, "status": "ok", "pause_state": "asleep", "cache_flushed": False}, False),
        ({**ROW, "status": "error", "error": ERROR}, True),
        ({**ROW, "status": "skipped", "reason": "a vision encoder"}, True),
        ({"instance_id": "a", "status": "skipped"}, False),
    ],
)
def test_a_row_has_the_fields_of_its_op_if_its_worker_succeeded(
    row: dict[str, Any], fits: bool, document: dict[str, Any]
) -> None:
    answer = {"status": "ok", "epoch": 1, "fingerprint": "f", "elapsed_s": 0.1, "workers": [row]}
    assert (reply_faults(document, FLEET_OPS["pause"], answer) == []) is fits
    assert reply_faults(document, FLEET_OPS["pause"], {**answer, "more": 1})
