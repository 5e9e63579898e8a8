"""The parts of an update that is sent part by part, and the ranks of its group. No I/O."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plane.errors import InvalidRequest, PayloadTooLarge
from rl_plane.fleet.fleet_replies import group_places
from rl_plane.membership.core import Member, Snapshot
from rl_plane.protocol.broadcast_plan import chunks, pieces
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES, encode
from rl_plane.protocol.update_requests import MAX_PART_TIMEOUT_S, PART_TIMEOUT_S, ReceivePart, UpdateWeights
from rl_plane.protocol.validation import parse_body
from rl_plane.protocol.vllm_bodies import InitInfo, Transfer, UpdateInfo, init_body, part_body
from rl_plane.sync import call_bound_s
from rl_plane.transports.base import colocated, receivers
from rl_plane.transports.group.rank_layout import Place

SIZES = {"a": 4, "b": 10, "c": 1, "d": 2, "e": 8}
"""Bytes of each tensor."""


def part(**more: Any) -> ReceivePart:
    described = {"names": list(SIZES), "dtypes": ["uint8"] * 5, "shapes": [[size] for size in SIZES.values()]}
    parsed = parse_body(ReceivePart, {"update_id": "u", **described, **more})
    assert isinstance(parsed, ReceivePart)
    return parsed


@pytest.mark.parametrize(
    ("layout", "cut"),
    [
        ({"layout": "each"}, ["a", "b", "c", "d", "e"]),
        ({"layout": "flat"}, ["abcde"]),
        ({"layout": "packed"}, ["abcde"]),
        ({"layout": "packed", "bucket_bytes": 4}, ["ab", "cde"]),
        ({"layout": "packed", "bucket_bytes": 14}, ["abc", "de"]),
        ({"layout": "packed", "bucket_bytes": 1}, ["a", "b", "cd", "e"]),
    ],
)
def test_a_part_is_cut_into_broadcasts_by_its_layout(layout: dict[str, Any], cut: list[str]) -> None:
    """The layout `packed` cuts after the tensor that overfills the bucket, as vLLM's producer does."""
    assert ["".join(name for name, _ in one) for one in chunks(part(**layout))] == cut
    assert chunks(part(names=[], dtypes=[], shapes=[], **layout)) == []


@pytest.mark.parametrize(
    "layout",
    [{"layout": "each"}, {"layout": "packed", "bucket_bytes": 1000}, {"layout": "flat", "check_only": True}],
)
def test_a_part_that_is_longer_than_a_message_is_announced_in_pieces(layout: dict[str, Any]) -> None:
    """Such a part is announced in several messages of the same broadcasts."""
    count = 20_000
    names = [f"model.layers.{number}.experts.{number}.down_proj.weight" for number in range(count)]
    long = part(
        names=names, dtypes=["torch.bfloat16"] * count, shapes=[[1, 1 + n % 7] for n in range(count)], **layout
    )
    told = pieces(long)
    assert len(told) > 1
    assert all(len(encode(one.model_dump())) < MAX_MESSAGE_BYTES * 0.7 for one in told)
    assert [name for one in told for name in one.names] == names
    assert [shape for one in told for shape in one.shapes] == long.shapes
    assert {(one.layout, one.check_only, one.timeout_s) for one in told} == {
        (long.layout, long.check_only, long.timeout_s)
    }
    if not long.check_only:
        assert [chunk for one in told for chunk in chunks(one)] == chunks(long)
    assert pieces(part()) == [part()]
    for one_broadcast in ({"layout": "flat"}, {"layout": "packed"}):
        with pytest.raises(PayloadTooLarge, match="a broadcast of 20000 tensors") as refused:
            pieces(long.model_copy(update={"check_only": False, "bucket_bytes": 1 << 30, **one_broadcast}))
        assert (refused.value.facts["field"], bool(refused.value.facts["fix"])) == ("names", True)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"dtypes": ["uint8"]}, "dtypes"),
        ({"shapes": []}, "shapes"),
        ({"names": ["a", "a", "c", "d", "e"]}, "names"),
        ({"names": ["a b", "b", "c", "d", "e"]}, "names"),
        ({"dtypes": ["complex64"] * 5}, "dtypes"),
        ({"shapes": [[-1]] * 5}, "shapes"),
        ({"shapes": [[1 << 39, 1 << 39]] * 5}, "shapes"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": MAX_PART_TIMEOUT_S + 1}, "timeout_s"),
    ],
)
def test_an_impossible_part_is_refused_by_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        part(**wrong)
    assert refused.value.facts["field"] == field


def test_dtypes_may_be_written_as_torch_writes_them() -> None:
    names = ["bfloat16", "torch.float32", "BF16", "float8_e4m3fn", "bool"]
    assert [spec.dtype for spec in part(dtypes=names).specs] == ["BF16", "F32", "BF16", "F8_E4M3", "BOOL"]


def fleet(*sizes: int) -> Snapshot:
    members = tuple(
        Member(f"{number:016x}", "incarnation", "server", number, number + 1, {"world_size": size})
        for number, size in enumerate(sizes)
    )
    return Snapshot(1, "print", members)


def test_an_engine_over_several_hosts_has_a_receiver_on_each() -> None:
    one, two = (
        {"host": "a", "world_size": 4},
        {"host": "a", "world_size": 8, "nodes": [{"host": "a"}, {"host": "b"}]},
    )
    members = [
        Member(name, "incarnation", "server", number, number + 1, info)
        for number, (name, info) in enumerate({"first": two, "second": one}.items())
    ]
    places = group_places(Snapshot(1, "print", tuple(members)), {})
    assert places == {"world_size": 4, "rank_offsets": {"first": 1, "second": 3}}
    assert receivers([one, two]) == 3
    assert [colocated(workers, "a") for workers in ([one], [one, two])] == [True, False]


def test_each_worker_has_its_place_behind_the_trainers() -> None:
    first, second, third = (f"{number:016x}" for number in range(3))
    own = {"form": "torch", "world_size": 8, "rank_offset": 2}
    wrong: dict[str, Any]
    assert group_places(fleet(1, 4, 1), own) == {
        "world_size": 8,
        "rank_offset": 2,
        "fleet_ranks": 6,
        "rank_offsets": {first: 2, second: 3, third: 7},
    }
    assert group_places(fleet(1, 4, 1), {}) == {
        "world_size": 4,
        "rank_offsets": {first: 1, second: 2, third: 3},
    }, "in the plane's own group a worker receives once for all of its ranks"
    for wrong, field in (
        ({"world_size": 7}, "world_size"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"rank_offsets": {}}, "rank_offsets"),
        ({"check_only": True}, "check_only"),
        ({"fleet_ranks": 6}, "fleet_ranks"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            group_places(fleet(1, 4, 1), {**own, **wrong})
        assert refused.value.facts["field"] == field
    config = {"group": "g", "master_address": "h", "master_port": 1, **own, "fleet_ranks": 6}
    places = Place.of_worker({**config, "members": 4}, "nccl", ("cuda:0", "cuda:1"))
    assert [(place.form, place.rank, place.device) for place in places] == [
        ("torch", 2, "cuda:0"),
        ("torch", 3, "cuda:1"),
        ("torch", 4, None),
        ("torch", 5, None),
    ]
    for wrong in ({"form": "round"}, {"lifeline_port": 5}, {"fleet_ranks": 0}, {"members": 7}, {"members": 0}):
        with pytest.raises(InvalidRequest):
            Place.of_worker({**config, **wrong}, "gloo", ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": {"kind": "lora", "op": "load", "name": "a"}},
        {"policy": {"staging": "none"}},
        {"encoding": "delta", "base": "blake3:" + "0" * 64, "digest": "blake3:" + "0" * 64},
    ],
)
def test_an_update_in_parts_must_be_a_full_checkpoint(wrong: dict[str, Any]) -> None:
    fed = {"transport": {"backend": "gloo", "group": "g", "in_parts": True}}
    assert UpdateWeights.model_validate(fed).in_parts
    with pytest.raises(InvalidRequest, match="all base weights"):
        UpdateWeights.model_validate({**fed, **wrong})


@pytest.mark.parametrize(
    ("asked", "configured", "waited"),
    [
        (None, PART_TIMEOUT_S, PART_TIMEOUT_S),
        (None, 3600.0, 3600.0),
        (1200.0, PART_TIMEOUT_S, 1200.0),
        (20.0, 3600.0, 20.0),
        (86_400.0, PART_TIMEOUT_S, MAX_PART_TIMEOUT_S),
    ],
)
def test_the_trainer_or_the_worker_bounds_the_wait_for_a_part(
    asked: float | None, configured: float, waited: float
) -> None:
    """The trainer states it when it forms its group, else the receiving side has its own. It bounds broadcasts, too."""
    info = InitInfo(backend="gloo", master_address="h", master_port=1, world_size=3, timeout_s=asked)
    transfer = Transfer.of(info, "g", configured)
    assert init_body(info, transfer)["timeout_s"] == waited
    told = part_body(UpdateInfo(names=["a"], dtype_names=["uint8"], shapes=[[1]]), transfer)
    assert ReceivePart.model_validate({"update_id": "u", **told}).timeout_s == waited
    assert call_bound_s("receive_weights_part", told) > waited
