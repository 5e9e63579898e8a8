"""The pure part of `rl-plane doctor`: which facts are ok, a warning or an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_plane.cli.doctor.check_line import CheckLine, size
from rl_plane.cli.doctor.checks import examine
from rl_plane.cli.doctor.doctor_command import summary
from rl_plane.cli.doctor.doctor_facts import Asked, DoctorFacts, NatsFacts
from tests.support.explained_facts import ABOUT, NATS, NOW, ONE, TWO

GB = 1_000_000_000
BUCKETS = {"members": {"storage": "file", "num_replicas": 1}, "state": {"storage": "file", "num_replicas": 1}}
SERVER = NatsFacts(
    "nats://n:4222",
    None,
    "",
    server=NATS,
    round_trip_s=0.001,
    clock=Asked({"clock": NOW}, NOW - 0.1, NOW + 0.1),
    account={"storage": GB, "limits": {"max_storage": -1}},
    buckets=BUCKETS,
    frontends=["f1"],
)


def root(path: str = "/share", **more: Any) -> dict[str, Any]:
    seen = {"device": 7, "inode": 99, "entries": 3, "digest": "d", "free_bytes": 100 * GB}
    return {"path": path, "error": None, **seen, **more}


def unreadable(why: str, path: str = "/share") -> dict[str, Any]:
    return {**dict.fromkeys(root()), "path": path, "error": why}


def worker(instance_id: str = ONE, host: str = "gpu1", *roots: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A worker's row of `describe`. `more`: fields of its `host`, or of the row."""
    facts = {
        "version": "0.1.0",
        "host": host,
        "clock": NOW,
        "nats": NATS,
        "free_memory_bytes": 20 * GB,
        "memory_limit": "MemAvailable of the machine",
        "shm_free_bytes": 8 * GB,
        "lacking": {},
        "roots": list(roots) or [root()],
    }
    row = {
        "instance_id": instance_id,
        "status": "ok",
        "engine": "fake",
        "engine_version": "1",
        "task": "generate",
        "logprobs_mode": "raw_logprobs",
        "transports": ["filesystem", "gloo"],
        "lacks": {},
        "weight_bytes": 2 * GB,
    }
    row |= {name: value for name, value in more.items() if name in row}
    return {**row, "host": facts | {name: value for name, value in more.items() if name in facts}}


def facts(*rows: dict[str, Any], about: dict[str, Any] | None = None, **more: Any) -> DoctorFacts:
    described = Asked({"workers": list(rows)}, NOW - 0.2, NOW + 0.2)
    asked = Asked({**ABOUT, **(about or {})}, NOW - 0.2, NOW + 0.2)
    given: dict[str, Any] = {"about": asked, "describe": described, "nats": SERVER, **more}
    return DoctorFacts("0.1.0", "http://x", **given)


def not_ok(found: DoctorFacts) -> list[CheckLine]:
    return [one for one in examine(found) if one.level != "ok"]


def only(found: DoctorFacts) -> CheckLine:
    (one,) = not_ok(found)
    assert one.fix
    return one


def test_a_sound_fleet_has_only_ok_lines() -> None:
    lines = examine(facts(worker(ONE), worker(TWO)))
    assert {one.level for one in lines} == {"ok"}
    assert summary(lines) == f"{len(lines)} ok, 0 warnings, 0 errors"
    checks = {one.check for one in lines}
    assert checks >= {"frontend", "key", "NATS", "JetStream", "bucket", "workers", "versions", "transports"}
    assert checks >= {"memory", "weight root", "disk", "clocks"}


@pytest.mark.parametrize(
    ("more", "level", "words"),
    [
        ({"server": {**NATS, "version": "2.10.9"}}, "error", "nats-server 2.10.9"),
        ({"server": {**NATS, "max_payload": 65536}}, "error", "max_payload is 65.5 kB"),
        ({"server": {**NATS, "jetstream": False}}, "error", "it is off"),
        ({"round_trip_s": 0.4}, "warning", "round trip 400.0 ms"),
        ({"account": {"storage": 95, "limits": {"max_storage": 100}}}, "error", "95 bytes on disk of 100 bytes"),
        ({"account": None, "account_error": "the key may not"}, "warning", "the key may not"),
        ({"buckets": {"state": {"storage": "file", "num_replicas": 3}}}, "error", "3 copies"),
        ({"buckets": {"state": {"storage": "memory", "num_replicas": 1}}}, "error", "memory storage"),
        ({"buckets": {"state": None}}, "error", "state is not there"),
        ({"frontends": []}, "warning", "none delivers tokens"),
        ({"write_error": {"code": "permission_denied", "message": "no"}}, "warning", "may not write"),
        ({"write_error": {"code": "bus_unreachable", "message": "late"}}, "error", "takes no writes: late"),
        ({"bucket_errors": {"state": "no answer"}}, "error", "state: no answer"),
        ({"clock": Asked({"clock": NOW + 60}, NOW, NOW + 1)}, "warning", "nats-server is 59.0 s ahead of"),
    ],
)
def test_each_fault_of_nats_has_a_line(more: dict[str, Any], level: str, words: str) -> None:
    found = only(facts(worker(ONE), nats=replace(SERVER, **more)))
    assert found.level == level
    assert words in found.words


def test_a_nats_that_is_not_reached_is_an_error_only_if_it_was_named() -> None:
    lost = replace(
        SERVER, server=None, clock=None, error={"message": "no NATS server answers", "fix": "start one"}
    )
    assert only(facts(worker(ONE), nats=lost)).level == "warning"
    known = [one.words for one in examine(facts(worker(ONE), nats=lost))]
    assert "nats-server 2.11.0 at nats://n:4222, says the frontend" in known
    assert only(facts(worker(ONE), nats=lost, nats_was_named=True)).level == "error"


def test_a_frontend_without_nats_or_lease_is_an_error() -> None:
    lost = only(facts(worker(ONE), about={"nats": {**NATS, "connected": False}}))
    assert (lost.level, lost.check) == ("error", "frontend")
    assert "no serving lease" in only(facts(worker(ONE), about={"serving_lease": False})).words
    away = DoctorFacts("0.1.0", "http://x", about_error={"message": "no frontend answers", "fix": "start one"})
    assert {one.level for one in not_ok(away)} == {"error", "warning"}


def test_a_key_is_named_with_its_role() -> None:
    lines = examine(
        facts(
            worker(ONE),
            about={"key": {"id": "prometheus", "role": "read"}},
            nats=replace(SERVER, key="UABC", role="operator"),
        )
    )
    keys = [one.words for one in lines if one.check == "key"]
    assert keys == [
        "the key for HTTP is prometheus, with the role read",
        "the key for NATS is UABC, with the role operator",
    ]


def test_workers_that_do_not_answer_are_errors() -> None:
    silent = {"instance_id": TWO, "status": "error", "error": {"message": "no answer within 1 s"}}
    found = only(facts(worker(ONE), silent))
    assert (found.level, found.fix) == ("error", f"`rl-plane explain {TWO}`")
    assert only(facts()).words == "there is none"


def test_versions_that_differ_are_named_with_their_processes() -> None:
    found = only(facts(worker(ONE), worker(TWO, version="0.2.0")))
    assert (found.level, found.check) == ("warning", "versions")
    assert f"0.2.0: worker {TWO}" in found.words
    engine = only(facts(worker(ONE), worker(TWO, engine_version="2")))
    assert engine.words.startswith("fake differs: ")


def test_workers_that_make_tokens_have_one_mode_of_logprobs() -> None:
    other = worker(TWO, logprobs_mode="processed_logprobs")
    found = only(facts(worker(ONE), other))
    assert (found.level, found.check) == ("error", "logprobs")
    assert f"processed_logprobs: worker {TWO}" in found.words
    assert not_ok(facts(worker(ONE), {**other, "task": "embed"})) == []


def test_a_transport_that_one_worker_lacks_says_why() -> None:
    lacking = {"gloo": "No module named 'torch'"}
    found = only(facts(worker(ONE), worker(TWO, transports=["filesystem"], lacking=lacking)))
    assert found.words == f"gloo is not on {TWO}: No module named 'torch'"
    on_none = examine(facts(worker(ONE, lacking={"nccl": "no GPU"})))
    assert "nccl is on no worker: no GPU" in [one.words for one in on_none]
    apart = not_ok(facts(worker(ONE, transports=["gloo"]), worker(TWO, transports=["filesystem"])))
    assert apart[0].words == "no transport is common to all workers"
    spanning = worker(ONE, transports=["filesystem"], lacks={"transport:gloo": "the engine spans hosts"})
    assert "spans hosts" in only(facts(spanning, worker(TWO))).words


def test_memory_is_counted_per_host() -> None:
    assert not not_ok(
        facts(worker(ONE, "a", free_memory_bytes=3 * GB), worker(TWO, "b", free_memory_bytes=3 * GB))
    )
    found = only(facts(worker(ONE, "a", free_memory_bytes=3 * GB), worker(TWO, "a", free_memory_bytes=3 * GB)))
    assert "a: a version takes 4.0 GB on 2 workers, 3.0 GB are free" in found.words
    shm = only(facts(worker(ONE, engine="vllm", shm_free_bytes=60 << 20)))
    assert "--shm-size" in shm.fix
    assert not not_ok(facts(worker(ONE, shm_free_bytes=60 << 20))), "the fake engine needs none"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (worker(TWO, "gpu1", root(inode=100)), "is not one directory for the workers on gpu1"),
        (worker(TWO, "gpu2", root(digest="e")), "has other names in it on some workers"),
        (worker(TWO, "gpu2", unreadable("No such file or directory")), f"is not readable by {TWO}"),
        (worker(TWO, "gpu2", root("/elsewhere")), f"is no root of {TWO}"),
    ],
)
def test_a_root_that_differs_is_an_error_only_if_it_was_named(other: dict[str, Any], words: str) -> None:
    named = [one for one in not_ok(facts(worker(ONE), other, roots=("/share",))) if words in one.words]
    assert [one.level for one in named] == ["error"]
    unnamed = [one for one in not_ok(facts(worker(ONE), other)) if words in one.words]
    assert [one.level for one in unnamed] == ["warning"]


def test_other_devices_on_other_hosts_are_the_same_share() -> None:
    assert not not_ok(facts(worker(ONE, "a"), worker(TWO, "b", root(device=8)), roots=("/share",)))
    copy = only(facts(worker(ONE, "a"), worker(TWO, "b", root(inode=5)), roots=("/share",)))
    assert copy.level == "warning"
    assert "may be a copy" in copy.words


def test_a_root_that_hangs_or_is_full_is_found() -> None:
    hangs = only(facts(worker(ONE, "a", unreadable("the file system does not answer within 0.6 s"))))
    assert hangs.level == "error"
    assert only(facts(worker(ONE, "a", root(free_bytes=GB)))).level == "warning"
    assert only(facts(worker(ONE, "a", root(free_bytes=GB)), roots=("/share",))).level == "error"
    assert only(facts(worker(ONE, "a", root(free_bytes=3 * GB)))).fix.endswith("soon")


def test_a_clock_counts_only_outside_the_question() -> None:
    asked = Asked({}, 100.0, 101.0)
    assert [asked.clock_off_s(clock) for clock in (99.0, 100.5, 103.0)] == [-1.0, 0.0, 2.0]
    found = only(facts(worker(ONE, clock=NOW - 60)))
    assert found.words == f"worker {ONE} on gpu1 is 59.8 s behind this machine"


def test_a_size_has_the_largest_unit() -> None:
    assert [size(value) for value in (5, 1500, 2 * GB)] == ["5 bytes", "1.5 kB", "2.0 GB"]
