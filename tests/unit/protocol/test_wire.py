"""Messages, errors, names and digests as they travel."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from blake3 import blake3

import rl_plane
from rl_plane import errors
from rl_plane.errors import InvalidRequest, MembershipChanged, PlaneError, error_from_wire
from rl_plane.protocol import validation, worker_ops
from rl_plane.protocol.envelope import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Reply,
    Request,
    decode,
    encode,
    encode_for_each,
    format_of,
    request_from_wire,
)
from rl_plane.protocol.fleet_ops import FLEET_OPS
from rl_plane.protocol.notices import OpNotice
from rl_plane.protocol.record import first_record
from rl_plane.protocol.subjects import Subjects, check_instance_id, key_of_inbox
from rl_plane.protocol.update_requests import update_arguments
from rl_plane.protocol.versions import TensorSpec, WeightVersion, tensors_digest

# ---- errors ----


def kinds(root: type[PlaneError]) -> Iterator[type[PlaneError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from kinds(child)


def test_every_error_that_can_come_is_public() -> None:
    tree = {kind.__name__ for kind in kinds(PlaneError)}
    assert tree <= set(rl_plane.__all__)


def test_beneath_a_traceback_stands_what_mends_an_error() -> None:
    error = InvalidRequest("it is 3", field="policy.barrier", fix="use 4")
    assert "".join(traceback.format_exception(error)).endswith(": it is 3\nfield: policy.barrier\nfix: use 4\n")


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("kind", list(kinds(PlaneError)), ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire(kind: type[PlaneError], form: Any) -> None:
    error = kind("what happened", field="a.b", fix="do this", before_epoch=3, nothing=None, workers=[{"x": 1}])
    reply = Reply("state", "id", "error", error=error, instance_id="a", incarnation="b")
    back = error_from_wire(decode(encode(reply.to_wire(), form))["error"])
    assert type(back) is kind
    assert back.message == str(back) == "what happened"
    assert back.facts == {"field": "a.b", "fix": "do this", "before_epoch": 3, "workers": [{"x": 1}]}
    assert 400 <= kind.http_status < 600


def test_codes_are_each_their_own() -> None:
    codes = [kind.code for kind in kinds(PlaneError)]
    assert len(codes) == len(set(codes))


def test_an_error_preserves_an_unknown_code() -> None:
    error = error_from_wire({"code": "from_the_future", "message": "m", "x": 1})
    assert type(error) is PlaneError
    assert error.facts == {"unknown_code": "from_the_future", "x": 1}


def test_a_changed_membership_makes_its_own_message() -> None:
    error = MembershipChanged(before_epoch=3, after_epoch=5)
    assert (error.before_epoch, error.after_epoch) == (3, 5)
    assert "3" in error.message
    assert "5" in error.message


@pytest.mark.parametrize("facts", [{"code": "x"}, {"message": "x"}])
def test_a_fact_never_hides_the_code_or_the_message(facts: dict[str, Any]) -> None:
    wire = InvalidRequest("m").to_wire()
    assert (wire["code"], wire["message"]) == ("invalid_request", "m")
    assert error_from_wire({**wire, **facts}).to_wire().keys() >= {"code", "message"}


# ---- envelopes ----

REQUEST = Request(
    "pause", {"mode": "keep", "x": [1, "ü", None, 1.5]}, "id", 3, "f" * 16, ("a", "b"), 9, "inc", 1_700_000_000_000
)


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("request_", [REQUEST, Request("state"), Request("state", targets=())])
def test_a_request_survives_the_wire(request_: Request, form: Any) -> None:
    data = encode(request_.to_wire(), form)
    assert format_of(data) == form
    assert request_from_wire(decode(data)) == request_


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_reply_survives_the_wire(form: Any) -> None:
    reply = Reply("state", "id", "ok", {"a": 1}, None, "i", "inc", [{"rank": 0}], 0.5)
    wire = decode(encode(reply.to_wire(), form))
    assert wire.pop("v") == PROTOCOL_VERSION
    assert wire.pop("body") == {"a": 1}
    assert wire == {
        "id": "id",
        "instance_id": "i",
        "incarnation": "inc",
        "op": "state",
        "status": "ok",
        "elapsed_s": 0.5,
        "rank_results": [{"rank": 0}],
    }


def test_nulls_are_absent_fields() -> None:
    assert request_from_wire({"op": "state", "fence": None, "targets": None, "body": None}) == Request("state")


@pytest.mark.parametrize("start", [b"", b" ", b"\n", b"\t", b"\r\n  "])
def test_json_may_start_with_white_space(start: bytes) -> None:
    assert format_of(start + b'{"op":"x"}') == "json"
    assert decode(start + b'{"op":"x"}') == {"op": "x"}


def test_everything_else_is_msgpack() -> None:
    for data in (b"", b"\x80", b"[1]", b'"x"', b"\xef\xbb\xbf{}"):
        assert format_of(data) == "msgpack"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{}{}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":"\xff"}',
        b" 1",
        b" null",
        b" [{}]",
        b'{"a":' * 200_000,
        b"\xc1",
        b"\x81\xa1a",
        b"\x80\x80",
        b"\x81\x01\x01",
        b"\x81\xa1a\xa1\xff",
        b"\x91" * 100_000 + b"\x80",
        b"\x93\x01\x02\x03",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc0",
    ],
    ids=range(21),
)
def test_bytes_that_are_no_map_are_a_typed_error(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(data)


def test_a_message_over_the_limit_is_not_parsed() -> None:
    fits = b'{"a":"' + b"x" * (MAX_MESSAGE_BYTES - 8) + b'"}'
    assert len(fits) == MAX_MESSAGE_BYTES
    assert decode(fits)
    with pytest.raises(InvalidRequest, match=str(MAX_MESSAGE_BYTES)):
        decode(fits + b" ")


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        ({}, "op"),
        ({"op": None}, "op"),
        ({"op": 1}, "op"),
        ({"op": True}, "op"),
        ({"op": "x", "body": [1]}, "body"),
        ({"op": "x", "id": 1}, "id"),
        ({"op": "x", "id": "x" * 129}, "id"),
        ({"op": "x", "epoch": "3"}, "epoch"),
        ({"op": "x", "epoch": True}, "epoch"),
        ({"op": "x", "epoch": 3.0}, "epoch"),
        ({"op": "x", "fence": math.nan}, "fence"),
        ({"op": "x", "fence": -1}, "fence"),
        ({"op": "x", "fence": 1 << 64}, "fence"),
        ({"op": "x", "deadline": 10**400}, "deadline"),
        ({"op": "x", "epoch": -1}, "epoch"),
        ({"op": "x", "fingerprint": 1}, "fingerprint"),
        ({"op": "x", "targets": "a"}, "targets"),
        ({"op": "x", "targets": [1]}, "targets.0"),
        ({"op": "x", "incarnation": 1}, "incarnation"),
        ({"op": "x", "deadline": math.inf}, "deadline"),
        ({"op": "x", "what": 1}, "what"),
        ({"op": "x", "v": 0}, "v"),
        ({"op": "x", "v": 2}, "v"),
        ({"op": "x", "v": "1"}, "v"),
        ({"op": "x", "v": True}, "v"),
        ({"op": "x", "v": None}, "v"),
    ],
)
def test_a_wrong_field_of_the_envelope_is_named(wire: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_from_wire(wire)
    assert caught.value.facts["field"] == field
    assert caught.value.facts["fix"]


@pytest.mark.parametrize(
    ("wire", "message", "fix"),
    [
        ({"op": 1}, "op: Input should be a valid string", "send a string"),
        ({"op": "x", "fence": "1"}, "fence: Input should be a valid integer", "send an integer"),
        ({"op": "x", "body": [1]}, "body: Input should be a valid dictionary", "send a map"),
        ({"op": "x", "targets": "a"}, "targets: Input should be a valid list", "send a list"),
        ({"op": "x", "what": 1}, "what: Extra inputs are not permitted", "leave it out"),
    ],
)
def test_an_error_of_the_envelope_has_a_fix_of_its_own(wire: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_from_wire(wire)
    assert (caught.value.message, caught.value.facts["fix"]) == (message, fix)


def test_nan_is_never_sent_as_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": math.nan}, "json")


def test_no_request_names_an_instant() -> None:
    """Clocks need not agree: what a sender waits is a duration, counted from the arrival."""
    wire = Request("drain", timeout_ms=1500).to_wire()
    assert wire == {"v": 1, "op": "drain", "body": {}, "timeout_ms": 1500}
    assert request_from_wire(wire) == Request("drain", timeout_ms=1500)
    with pytest.raises(InvalidRequest) as caught:
        request_from_wire({**wire, "deadline": 1_700_000_000_000})
    assert caught.value.facts["field"] == "deadline"


# ---- ops ----

RECORD = first_record("blake3:" + "0" * 64).to_wire()
BAD_BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("state", {"x": 1}, "x"),
    ("pause", {"mode": "soft"}, "mode"),
    ("pause", {"lease_s": math.nan}, "lease_s"),
    ("pause", {"lease_s": math.inf}, "lease_s"),
    ("pause", {"lease_s": 0}, "lease_s"),
    ("pause", {"lease_s": -1}, "lease_s"),
    ("pause", {"lease_s": 1e9}, "lease_s"),
    ("pause", {"leases": 3}, "leases"),
    ("pause", {"clear_cache": "perhaps"}, "clear_cache"),
    ("drain", {"timeout_s": -3}, "timeout_s"),
    ("drain", {"timeout_s": math.nan}, "timeout_s"),
    ("abort_requests", {"request_ids": "all"}, "request_ids"),
    ("abort_requests", {"request_ids": [1]}, "request_ids.0"),
    ("release_memory", {"tags": []}, "tags"),
    ("release_memory", {"tags": ["disk"]}, "tags.0"),
    ("check_weights", {"action": "guess"}, "action"),
    ("set_admission", {}, "open"),
    ("set_admission", {"open": True, "reason": "mood"}, "reason"),
    ("prepare_update", {"label": "x", "transport": {"backend": "b"}}, "update_id"),
    ("prepare_update", {"update_id": "u", "label": "", "transport": {"backend": "b"}}, "label"),
    ("prepare_update", {"update_id": "u", "label": "x", "transport": {}}, "transport.backend"),
    ("commit_update", {"update_id": "u", "sequence": 3}, "record"),
    ("commit_update", {"update_id": "u", "record": RECORD, "sequence": -1}, "sequence"),
    ("follow_record", {"record": RECORD, "sequence": "x"}, "sequence"),
    ("update_weights", {"transport": {"backend": "b"}, "policy": {"min_ready": 0}}, "policy.min_ready"),
    ("update_weights", {"transport": {"backend": "b"}, "policy": {"prepare_timeout_s": math.nan}},
     "policy.prepare_timeout_s"),
    ("update_weights", {"transport": {"backend": "b"}, "policy": {"commit_timeout_s": -1}},
     "policy.commit_timeout_s"),
    ("update_weights", {"transport": {"backend": "b"}, "version": "x" * 201}, "version"),
    ("update_weights", {"transport": {"backend": "b"}, "version": {"label": "x"}}, "version"),
    ("update_weights", {"transport": {"backend": "b"}, "target": {"kind": "lora", "op": "eat", "name": "a"}},
     "target.op"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "body", "field"), BAD_BODIES)
def test_a_wrong_field_of_a_body_is_named(op: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.parse_body(worker_ops.op_named(op).request, body)
    assert caught.value.facts["field"].replace(".lora", "") == field.replace(".lora", "")
    assert caught.value.facts["fix"]


def test_an_unknown_op_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest) as caught:
        worker_ops.op_named("stat")
    assert caught.value.facts["field"] == "op"
    assert all(name in caught.value.facts["fix"] for name in worker_ops.OPS)


def test_the_ops_are_those_of_the_design() -> None:
    named = """liveness describe state pause resume flush_cache abort_requests init_transport destroy_transport
        listen_update receive_part prepare_update commit_update abort_update update_weights release_memory resume_memory
        check_weights set_admission drain open_relay report_record follow_record tokenize detokenize
        parse_tool_calls"""
    assert set(named.split()) | {"ping"} == set(worker_ops.OPS)
    reading = {
        "ping",
        "liveness",
        "describe",
        "state",
        "report_record",
        "tokenize",
        "detokenize",
        "parse_tool_calls",
    }
    assert {name for name, op in worker_ops.OPS.items() if not op.changes} == reading
    assert all(op.doc and op.timeout_s > 0 for op in worker_ops.OPS.values())


def test_the_traits_of_the_fleets_ops_agree() -> None:
    ops = FLEET_OPS.values()
    commits, begins = ({op.name for op in ops if op.commits}, {op.name for op in ops if op.begins_update})
    assert commits - begins == {"complete_weights_update"}
    assert begins - commits == {"prepare_weights_update"}
    assert {op.name for op in ops if op.brings_weights} <= begins
    assert {op.name for op in ops if op.prepare_waits} <= commits | begins
    assert {op.worker_op for op in ops} - {""} <= worker_ops.OPS.keys()
    assert {op.name for op in ops if op.worker_in_path} == {op.name for op in ops if op.admin}


def test_the_fleets_ops_are_those_of_the_design() -> None:
    posts = """pause resume flush_cache abort_requests init_transport destroy_transport update_weights
        prepare_weights_update receive_weights_part label_weights_update complete_weights_update abort_weights_update
        release_memory resume_memory check_weights load_lora_adapter unload_lora_adapter new_run
        workers/{id}/enable workers/{id}/disable"""
    gets = "ready liveness state workers weight_version updates"
    paths = {op.path: op.method for op in FLEET_OPS.values()}
    assert set(posts.split()) == {path for path, method in paths.items() if method == "POST"}
    assert set(gets.split()) <= {path for path, method in paths.items() if method == "GET"}


# ---- names ----


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64])
def test_good_names_become_parts_of_the_subjects(name: str) -> None:
    subjects = Subjects(name, name)
    assert subjects.rl == f"{name}.{name}.rl"
    assert subjects.rl_direct("0" * 16) == f"{name}.{name}.rl.{'0' * 16}"
    assert subjects.generate("0" * 16) == f"{name}.{name}.generate.{'0' * 16}"
    assert subjects.fleet == f"{name}.{name}.fleet"
    assert subjects.members.name == f"rlp_{name}_{name}_members"
    assert subjects.members.key_of_feed(subjects.members.feed("w.x")) == "w.x"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "x" * 65, "ü", "a\n", "a/b", "$KV"])
def test_bad_names_are_refused_with_their_field(name: str) -> None:
    for names in ((name, "c"), ("n", name)):
        with pytest.raises(InvalidRequest) as caught:
            Subjects(*names)
        assert caught.value.facts["field"] in ("namespace", "component")


@pytest.mark.parametrize("value", ["", "0" * 15, "0" * 17, "A" * 16, "0" * 15 + "g", "0" * 16 + "\n"])
def test_bad_instance_ids_are_refused_with_their_field(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_instance_id("workers", value)
    assert caught.value.facts["field"] == "workers"


# ---- versions ----


def test_a_version_survives_the_wire() -> None:
    version = WeightVersion("r", 3, "step_3", "blake3:" + "0" * 64)
    assert WeightVersion.from_wire(json.loads(json.dumps(version.to_wire()))) == version
    assert WeightVersion.from_wire(msgpack.unpackb(msgpack.packb(version.to_wire()))) == version


def test_the_digest_is_that_of_the_sorted_lines() -> None:
    a, b = blake3(b"\x00" * 8).hexdigest(), blake3(b"\x01\x02").hexdigest()
    tensors = [("z", TensorSpec("F32", (2, 1)), a), ("a.b", TensorSpec("BF16", ()), b)]
    expected = "blake3:" + blake3(f"a.b BF16  {b}\nz F32 2x1 {a}".encode()).hexdigest()
    assert tensors_digest(tensors) == tensors_digest(reversed(tensors)) == expected


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [(TensorSpec("F32", (2, 3)), 24), (TensorSpec("BF16", ()), 2), (TensorSpec("I64", (0, 5)), 0)],
)
def test_a_tensors_size_follows_from_its_dtype_and_shape(spec: TensorSpec, nbytes: int) -> None:
    assert spec.nbytes == nbytes


@pytest.mark.parametrize("body", [{}, {"label": "x" * 300}])
def test_a_request_for_each_is_the_same_request_with_its_incarnation(body: dict[str, Any]) -> None:
    request = Request("drain", body, "id", 1, "f", ("a" * 16,), fence=7, timeout_ms=8)
    for incarnation, data in zip(("0" * 16, "x"), encode_for_each(request, ("0" * 16, "x")), strict=True):
        assert request_from_wire(decode(data)) == replace(request, incarnation=incarnation)


@pytest.mark.parametrize(
    "subject", ["", "_INBOX", "_INBOX.x.1", f"_INBOX.{'U' * 55}.1", f"x.{'U' * 56}", f"_INBOX.{'U' * 57}"]
)
def test_a_subject_that_is_no_keys_inbox_gives_no_key(subject: str) -> None:
    assert key_of_inbox(subject) == ""


# ---- notices ----

NOTICE = {"op": "pause", "who": "trainer@host:1", "key": "U" * 56, "outcome": "ok"}


def test_a_notice_is_read_as_it_was_sent() -> None:
    notice = OpNotice(**NOTICE)
    assert OpNotice.decode(notice.encode()) == notice


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"op": "state"}, "op"),
        ({"op": "fly"}, "op"),
        ({"key": "admin"}, "key"),
        ({"key": "U" * 56 + " (said)"}, "key"),
        ({"who": "two\nlines"}, "who"),
        ({"outcome": "x" * 257}, "outcome"),
        ({"proved": True}, "proved"),
    ],
)
def test_a_notice_names_a_changing_op_and_no_proved_key(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        OpNotice.decode(encode({**NOTICE, **wrong}))
    assert refused.value.facts["field"] == field


def test_describe_takes_weight_roots_only_with_the_host() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.parse_body(worker_ops.Describe, {"weight_roots": ["/data"]})
    assert caught.value.facts["field"] == "weight_roots"


@pytest.mark.parametrize(
    ("target", "fix"), [({"name": "a"}, "add 'kind'"), ({"kind": "x"}, "use one of 'base', 'lora'")]
)
def test_a_target_without_a_known_kind_gets_a_fix(target: dict[str, Any], fix: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        update_arguments(target=target)
    assert caught.value.facts == {"field": "target", "fix": fix}
