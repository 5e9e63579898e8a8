"""The typed method of an op has the fields of the op's request as its arguments."""

from __future__ import annotations

import inspect
import typing

import pytest

from rl_plane.fleet.fleet_methods import FleetMethods
from rl_plane.protocol.fleet_ops import FLEET_OPS, FleetOp, Select
from rl_plane.protocol.fleet_reply_types import Selection

BY_OTHER_NAMES = {
    "load_lora_adapter": {"name": "lora_name", "path": "lora_path"},
    "unload_lora_adapter": {"name": "lora_name"},
}
"""Op → the argument of its method → the field of its request."""

OF_NAMED_WORKERS = "the method names the workers, so it neither waits for a number of workers nor pins the fleet"
OF_DIALECTS = "only the frontend's dialects know where tensors lie in the memory of a trainer on the same machine"
NO_ARGUMENT = {
    "enable": dict.fromkeys(("epoch", "fingerprint", "min_workers", "wait_s"), OF_NAMED_WORKERS),
    "disable": dict.fromkeys(("epoch", "fingerprint", "min_workers", "wait_s"), OF_NAMED_WORKERS),
    "update_weights": {"rollback": "the method `rollback` gives it"},
    "prepare_weights_update": {"owner": "only the frontend's dialects keep their updates apart by it"},
    "receive_weights_part": dict.fromkeys(("memories", "places", "unused"), OF_DIALECTS),
}
"""Op → a field of its request that is no argument of its method → the reason."""

NO_FIELD = {
    "init_transport": {"options": "the fields of the transport, which the request takes beside `backend`"},
}
"""Op → an argument of its method that is no field of its request → the reason."""


def arguments(op: FleetOp) -> list[str]:
    """The arguments of the op's method. The keys of a TypedDict of keywords count one by one."""
    method = inspect.unwrap(getattr(FleetMethods, op.name))
    hints = typing.get_type_hints(method)
    found: list[str] = []
    for one in list(inspect.signature(method).parameters.values())[1:]:
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            (keywords,) = typing.get_args(hints[one.name])
            found += typing.get_type_hints(keywords)
        else:
            found.append(one.name)
    return found


@pytest.mark.parametrize("op", FLEET_OPS.values(), ids=FLEET_OPS)
def test_a_method_has_the_fields_of_its_op(op: FleetOp) -> None:
    found = arguments(op)
    assert len(found) == len(set(found))
    names = BY_OTHER_NAMES.get(op.name, {})
    given = {names.get(name, name) for name in found if name != "request_id"}
    assert given - NO_FIELD.get(op.name, {}).keys() == (
        op.request.model_fields.keys() - NO_ARGUMENT.get(op.name, {}).keys()
    )


@pytest.mark.parametrize("op", FLEET_OPS.values(), ids=FLEET_OPS)
def test_a_method_takes_a_request_id_if_its_op_begins_an_update(op: FleetOp) -> None:
    assert ("request_id" in arguments(op)) is op.begins_update


def test_each_exception_still_is_one() -> None:
    for name, fields in NO_ARGUMENT.items():
        assert fields.keys() <= FLEET_OPS[name].request.model_fields.keys()
        assert not fields.keys() & set(arguments(FLEET_OPS[name]))
    for name, options in NO_FIELD.items():
        assert options.keys() <= set(arguments(FLEET_OPS[name]))
        assert not options.keys() & FLEET_OPS[name].request.model_fields.keys()


def test_a_selection_has_the_fields_of_the_request() -> None:
    assert typing.get_type_hints(Selection).keys() == Select.model_fields.keys()
