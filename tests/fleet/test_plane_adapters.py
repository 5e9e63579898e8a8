"""Adapters (LoRA) go through the same transaction as the base weights; the tokens show which weights made them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rl_plane.bus.state_store import read_record
from rl_plane.client import RlClient
from rl_plane.errors import (
    Conflict,
    InvalidRequest,
    InvalidWeights,
    Locked,
    NotFound,
    PlaneError,
    Unsupported,
    UpdateAborted,
)
from tests.support.adapter_updates import adapter, load, target
from tests.support.faults import StatusLog, Stream, generate, spawn_faulty
from tests.support.fleet_updates import coordinator_that_dies, states, update_of
from worker.engines.fake.adapter import fake_token, make_fake_adapter
from worker.receive.staging import adapter_digest, model_digest

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

PROMPT = [5, 6, 7]
HEAL_S = 40.0


async def proven(client: RlClient, worker: str, base: dict[str, Any], **adapters: dict[str, Any]) -> None:
    """Checks by tokens that this worker serves exactly these adapters."""
    plain = await generate(client, worker, PROMPT, 3)
    assert plain.tokens == [fake_token(base["digest"], PROMPT, n) for n in range(3)]
    assert [span["adapter"] for span in plain.spans] == [None]
    for name, version in adapters.items():
        made = await generate(client, worker, PROMPT, 3, adapter=name)
        assert made.tokens == [fake_token(base["digest"], PROMPT, n, 512, version["digest"]) for n in range(3)]
        (span,) = made.spans
        assert (span["sequence"], span["digest"]) == (base["sequence"], base["digest"])
        told = {"name": name, "version": version["label"], "sequence": version["sequence"]}
        assert span["adapter"] == {**told, "digest": version["digest"]}
    state = (await states(client))[worker]
    assert (state["adapters"], state["loras"]) == (adapters, sorted(adapters))


async def all_proven(
    client: RlClient, workers: Sequence[str], base: dict[str, Any], **adapters: dict[str, Any]
) -> None:
    for worker in workers:
        await proven(client, worker, base, **adapters)


async def base_of(client: RlClient) -> dict[str, Any]:
    version: dict[str, Any] = (await client.run("weight_version"))["version"]
    return version


async def until_serving(plane: Plane, client: RlClient, worker: str, sequence: int) -> None:
    async def serving() -> bool:
        state = (await states(client)).get(worker)
        return state is not None and state["ready"] and state["sequence"] == sequence

    await plane.until(serving, HEAL_S)


async def test_load_swap_and_unload_are_updates_like_any_other(plane: Plane) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    base = await base_of(client)
    one = await load(client, adapter(plane, 1))
    assert (one["run"], one["sequence"], one["label"]) == (base["run"], 1, "1")
    assert one["digest"] == adapter_digest(adapter(plane, 1))
    other = await load(client, adapter(plane, 2), name="b")
    await all_proven(client, ids, base, a=one, b=other)
    two = (await client.run("update_weights", target("swap", "a", adapter(plane, 3), version="three")))["version"]
    assert (two["sequence"], two["label"]) == (3, "three")
    await all_proven(client, ids, base, a=two, b=other)
    state = await client.run("state")
    assert (state["version"], state["adapters"], state["sequence"]) == (base, {"a": two, "b": other}, 3)
    assert state["loras"] == ["a", "b"]
    gone = (await client.run("update_weights", target("unload", "b")))["version"]
    assert gone["sequence"] == 4
    await all_proven(client, ids, base, a=two)
    with pytest.raises(InvalidRequest) as caught:
        await generate(client, ids[0], PROMPT, 3, adapter="b")
    assert caught.value.facts["field"] == "model"
    assert await base_of(client) == base
    entries = (await client.run("updates"))["updates"]
    targets = [(entry["target"]["op"], entry["target"]["name"]) for entry in entries[:4]]
    assert targets == [("unload", "b"), ("swap", "a"), ("load", "b"), ("load", "a")]
    assert [entry["version"] for entry in entries] == [gone, two, other, one, base]
    assert entries[0]["transport"] is None


async def test_adapters_are_loaded_swapped_and_unloaded_by_their_own_ops(plane: Plane) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    base = await base_of(client)
    versions = []
    for seed in (1, 2):
        body = {"lora_name": "a", "lora_path": str(adapter(plane, seed))}
        versions.append((await client.run("load_lora_adapter", body, f"id-{seed}"))["version"])
        await all_proven(client, ids, base, a=versions[-1])
    assert [version["sequence"] for version in versions] == [1, 2]
    gone = await client.run("unload_lora_adapter", {"lora_name": "a"}, "id-3")
    assert gone["version"]["sequence"] == 3
    await all_proven(client, ids, base)


async def test_asked_again_under_its_id_the_first_answer_comes(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn_copies(2)
    loading = {"lora_name": "a", "lora_path": str(adapter(plane, 1))}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("load_lora_adapter", loading),
        ("update_weights", target("swap", "a", adapter(plane, 2))),
        ("load_lora_adapter", {**loading, "lora_path": str(adapter(plane, 3))}),
        ("unload_lora_adapter", {"lora_name": "a"}),
        ("update_weights", target("load", "b", adapter(plane, 1))),
        ("update_weights", target("unload", "b")),
    ]
    first = []
    for number, (op, body) in enumerate(calls):
        first.append((await client.run(op, body, f"id-{number}"))["version"])
        again = await client.run(op, body, f"id-{number}")
        assert again["version"] == first[-1]
    for number, (op, body) in enumerate(calls):
        assert (await client.run(op, body, f"id-{number}"))["version"] == first[number]
    assert [version["sequence"] for version in first] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InvalidRequest):
        await client.run("load_lora_adapter", {**loading, "lora_name": "c"}, "id-0")


# ---- what is refused ----


def broken_config(path: Path) -> Path:
    file = path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "use_dora": True}))
    return path


def of_another_model(plane: Plane) -> Path:
    other = plane.model(9, nbytes=2048)
    return make_fake_adapter(plane.tmp / "weights" / "other", 1, other)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("load of a loaded adapter", Conflict),
        ("swap of none", NotFound),
        ("unload of none", NotFound),
        ("unload by name of none", NotFound),
        ("config", InvalidWeights),
        ("model", InvalidWeights),
        ("path", InvalidRequest),
        ("no transport", InvalidRequest),
        ("transport to unload", InvalidRequest),
        ("unstaged", InvalidRequest),
        ("name", InvalidRequest),
        ("the base's name", InvalidRequest),
    ],
)
async def test_a_wrong_adapter_call_changes_no_worker(plane: Plane, what: str, kind: type[PlaneError]) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    base, one = await base_of(client), await load(client, adapter(plane, 1))
    two = adapter(plane, 2)
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "load of a loaded adapter": ("update_weights", target("load", "a", two)),
        "swap of none": ("update_weights", target("swap", "b", two)),
        "unload of none": ("update_weights", target("unload", "b")),
        "unload by name of none": ("unload_lora_adapter", {"lora_name": "b"}),
        "config": ("update_weights", target("swap", "a", broken_config(adapter(plane, 3)))),
        "model": ("load_lora_adapter", {"lora_name": "b", "lora_path": str(of_another_model(plane))}),
        "path": ("load_lora_adapter", {"lora_name": "b", "lora_path": "/etc"}),
        "no transport": ("update_weights", target("swap", "a")),
        "transport to unload": ("update_weights", target("unload", "a", two)),
        "unstaged": ("update_weights", target("swap", "a", two, policy={"staging": "none"})),
        "name": ("load_lora_adapter", {"lora_name": "a\nb", "lora_path": str(two)}),
        "the base's name": ("load_lora_adapter", {"lora_name": "seed0", "lora_path": str(two)}),
    }
    statuses = await StatusLog.follow(client)
    op, body = calls[what]
    with pytest.raises(kind) as caught:
        await client.run(op, body)
    assert type(caught.value) is kind
    assert caught.value.facts["fix"]
    await all_proven(client, ids, base, a=one)
    assert set(statuses.admitted) == {frozenset(ids)}
    assert all(state["staged"] is None for state in (await states(client)).values())
    assert (await load(client, adapter(plane, 4), "swap"))["sequence"] == 2


# ---- one worker fails ----


async def test_a_worker_that_cannot_stage_aborts_it_for_all_or_is_excluded(plane: Plane) -> None:
    client = await plane.client()
    bad, good = spawn_faulty(plane), plane.spawn()
    await client.wait_for(2)
    ids = [bad.instance_id, good.instance_id]
    base, one = await base_of(client), await load(client, adapter(plane, 1))
    bad.fail("fail_stage")
    with pytest.raises(UpdateAborted):
        await load(client, adapter(plane, 2), "swap")
    await all_proven(client, ids, base, a=one)
    body = target("swap", "a", adapter(plane, 2), policy={"on_prepare_failure": "exclude"})
    reply = await client.run("update_weights", body)
    assert reply["excluded"] == [bad.instance_id]
    two = reply["version"]
    assert two["sequence"] == 2
    await proven(client, good.instance_id, base, a=two)
    assert not (await states(client))[bad.instance_id]["admission"]["open"]
    with pytest.raises(PlaneError):
        await generate(client, bad.instance_id, PROMPT, 3)
    bad.mend("fail_stage")
    await until_serving(plane, client, bad.instance_id, 2)
    await proven(client, bad.instance_id, base, a=two)


@pytest.mark.parametrize("op", ["load", "swap", "unload"])
async def test_a_swap_that_fails_after_the_decision_excludes_that_worker_until_it_heals(
    plane: Plane, op: str
) -> None:
    client = await plane.client()
    bad, good = spawn_faulty(plane), plane.spawn()
    await client.wait_for(2)
    base = await base_of(client)
    if op != "load":
        await load(client, adapter(plane, 1))
    statuses = await StatusLog.follow(client)
    bad.fail("fail_swap")
    reply = await client.run("update_weights", target(op, "a", None if op == "unload" else adapter(plane, 2)))
    assert reply["excluded"] == [bad.instance_id]
    version = reply["version"]
    now = {} if op == "unload" else {"a": version}
    await proven(client, good.instance_id, base, **now)
    state = (await states(client))[bad.instance_id]
    assert not state["admission"]["open"]
    assert state["sequence"] is None
    assert any("fail_swap" in reason for reason in state["admission"]["reasons"])
    with pytest.raises(PlaneError):
        await generate(client, bad.instance_id, PROMPT, 3)
    failures = len(statuses.of(bad.instance_id))
    bad.mend("fail_swap")
    await until_serving(plane, client, bad.instance_id, version["sequence"])
    await proven(client, bad.instance_id, base, **now)
    assert failures < 20, "it tried without a pause"


LOST_WHEN_CUT = """
import asyncio, worker.engines.fake.adapter as fake
from worker.engines.base import AdapterLost
really, cut = fake.FakeEngine.swap_adapter, Path({folder!r}, "cut")
async def swap_adapter(self, name, staging, version):
    if name not in self.adapters or cut.exists():
        return await really(self, name, staging, version)
    cut.touch()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        del self.adapters[name]
        raise AdapterLost("it could not be put back")
fake.FakeEngine.swap_adapter = swap_adapter
"""


async def test_an_adapter_that_is_lost_in_a_swap_that_a_deadline_ends_is_fetched_anew(plane: Plane) -> None:
    """This also holds where the next committed version equals the lost one."""
    client = await plane.client()
    bad, good = plane.spawn(patch=LOST_WHEN_CUT.format(folder=str(plane.tmp))), plane.spawn()
    await client.wait_for(2)
    base = await base_of(client)
    await load(client, adapter(plane, 1))
    swapping = asyncio.create_task(
        client.run("update_weights", target("swap", "a", adapter(plane, 2), policy={"commit_timeout_s": 3}))
    )
    await plane.until((plane.tmp / "cut").exists)
    shutil.rmtree(plane.tmp / "weights" / "adapter2")  # no worker can fetch it again
    assert (await swapping)["excluded"] == [bad.instance_id]
    back = await load(client, adapter(plane, 1), "swap")
    await until_serving(plane, client, bad.instance_id, back["sequence"])
    await all_proven(client, [bad.instance_id, good.instance_id], base, a=back)


async def test_a_worker_that_was_killed_heals_base_and_adapters_before_it_is_admitted(plane: Plane) -> None:
    client = await plane.client()
    doomed, other = plane.spawn_many(2)
    await client.wait_for(2)
    adapters = {"a": await load(client, adapter(plane, 1)), "b": await load(client, adapter(plane, 2), name="b")}
    base = (await client.run("update_weights", update_of(plane.model(1), "step_1")))["version"]
    adapters["a"] = await load(client, adapter(plane, 3), "swap")
    statuses = await StatusLog.follow(client)
    doomed.kill()
    again = plane.spawn(instance_id=doomed.instance_id, stage_delay_s=0.2)
    await until_serving(plane, client, again.instance_id, 4)
    await all_proven(client, [again.instance_id, other.instance_id], base, **adapters)
    incarnation = (await states(client))[again.instance_id] and statuses.of(again.instance_id)[-1]["incarnation"]
    opened = [
        status
        for status in statuses.of(again.instance_id)
        if status["incarnation"] == incarnation and status["admission"]["open"]
    ]
    assert opened
    assert all((status["version"], status["adapters"]) == (base, adapters) for status in opened)


async def test_an_adapter_whose_source_is_gone_keeps_a_new_worker_closed_until_it_is_unloaded(
    plane: Plane,
) -> None:
    client = await plane.client()
    plane.spawn()
    await client.wait_for(1)
    base, path = await base_of(client), adapter(plane, 1)
    await load(client, path)
    other = await load(client, adapter(plane, 2), name="b")
    shutil.rmtree(path)
    joiner = plane.spawn()

    async def told() -> bool:
        admission = (await states(client))[joiner.instance_id]["admission"]
        assert not admission["open"]
        return any(str(path) in reason for reason in admission["reasons"])

    await plane.until(told, HEAL_S)
    reply = await client.run("unload_lora_adapter", {"lora_name": "a"})
    await until_serving(plane, client, joiner.instance_id, reply["version"]["sequence"])
    await proven(client, joiner.instance_id, base, b=other)


@pytest.mark.parametrize("op", ["swap", "unload"])
@pytest.mark.parametrize("at", ["prepare_update", "follow_record", "commit_update"])
async def test_without_their_coordinator_the_workers_end_it(plane: Plane, at: str, op: str) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    base, one = await base_of(client), await load(client, adapter(plane, 1))
    body = target(op, "a", None if op == "unload" else adapter(plane, 2))
    await coordinator_that_dies(plane, body, at)
    sequence = 1 if at == "prepare_update" else 2
    for worker in ids:
        await until_serving(plane, client, worker, sequence)
    record = await read_record(client.bus, client.subjects().state)
    assert record is not None
    adapters = {name: dict(each.version.to_wire()) for name, each in record.adapters.items()}
    assert adapters == ({"a": one} if sequence == 1 else {} if op == "unload" else {"a": record.made.to_wire()})
    await all_proven(client, ids, base, **adapters)
    assert (await load(client, adapter(plane, 3), name="b"))["sequence"] == sequence + 1


async def test_an_engine_without_adapters_says_so(plane: Plane) -> None:
    client = await plane.client()
    plane.spawn_many(
        2,
        patch="""
import worker.engines.fake.adapter as fake
from dataclasses import replace
real = fake.FakeEngine.start
async def start(self):
    return replace(await real(self), lacks={"prepare_update:lora": "it has none"})
fake.FakeEngine.start = start
""",
    )
    await client.wait_for(2)
    statuses = await StatusLog.follow(client)
    with pytest.raises(Unsupported) as caught:
        await load(client, adapter(plane, 1))
    assert caught.value.facts["field"] == "target.kind"
    assert len(set(statuses.admitted)) == 1


async def test_an_adapter_that_has_no_place_is_refused_before_it_is_decided(plane: Plane) -> None:
    client = await plane.client()
    patch = """
import worker.engines.fake.adapter as fake
from dataclasses import replace
real = fake.FakeEngine.start
async def start(self):
    return replace(await real(self), max_adapters=1)
fake.FakeEngine.start = start
"""
    ids = [one.instance_id for one in plane.spawn_many(2, patch=patch)]
    base = await base_of(client)
    one = await load(client, adapter(plane, 1))
    with pytest.raises(InvalidRequest, match="no place") as caught:
        await load(client, adapter(plane, 2), name="b")
    assert caught.value.facts["field"] == "target.name"
    await all_proven(client, ids, base, a=one)
    two = await load(client, adapter(plane, 2), "swap")
    await all_proven(client, ids, base, a=two)
    await client.run("unload_lora_adapter", {"lora_name": "a"})
    await all_proven(client, ids, base, b=await load(client, adapter(plane, 3), name="b"))


async def test_the_same_bytes_again_are_another_version(plane: Plane) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    base, path = await base_of(client), adapter(plane, 1)
    await load(client, path)
    again = await load(client, path, "swap", barrier="rolling")
    other = await load(client, path, name="b")
    assert (again["sequence"], other["sequence"]) == (2, 3)
    assert again["digest"] == other["digest"]
    await all_proven(client, ids, base, a=again, b=other)
    assert all(state["staged"] is None for state in (await states(client)).values())


# ---- the base beneath ----


@pytest.mark.parametrize("fate", ["keep", "drop"])
async def test_an_update_of_the_base_says_what_becomes_of_the_adapters(plane: Plane, fate: str) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    one = await load(client, adapter(plane, 1))
    body = {**update_of(plane.model(1), "step_1"), "target": {"kind": "base", "adapters": fate}}
    base = (await client.run("update_weights", body))["version"]
    assert base["sequence"] == 2
    kept = {"a": one} if fate == "keep" else {}
    await all_proven(client, ids, base, **kept)
    assert (await client.run("state"))["adapters"] == kept
    joiner = plane.spawn()
    await until_serving(plane, client, joiner.instance_id, 2)
    await proven(client, joiner.instance_id, base, **kept)


async def test_a_running_request_of_an_adapter_that_is_dropped_with_the_base_ends(plane: Plane) -> None:
    """It makes no token by a mixture that was never committed."""
    client = await plane.client()
    worker = plane.spawn(token_delay_s=0.01)
    old, one = await base_of(client), await load(client, adapter(plane, 1))
    ending = Stream(client, worker.instance_id, PROMPT, 3000, adapter="a")
    going = Stream(client, worker.instance_id, PROMPT, 3000)
    await ending.more()
    await going.more()
    body = {**update_of(plane.model(1), "step_1"), "target": {"kind": "base", "adapters": "drop"}}
    new = (await client.run("update_weights", body))["version"]
    await ending.end()
    assert ending.finish_reason == "abort"
    (span,) = ending.spans
    assert (span["digest"], span["adapter"]["digest"]) == (old["digest"], one["digest"])
    made = [fake_token(old["digest"], PROMPT, n, 512, one["digest"]) for n in range(len(ending.tokens))]
    assert ending.tokens == made
    for _ in range(3):
        await going.more()
    await client.run("abort_requests", {})
    await going.end()
    first, second = going.spans
    assert (first["digest"], second["digest"]) == (old["digest"], new["digest"])


async def test_a_running_request_continues_with_the_swapped_adapter(plane: Plane) -> None:
    client = await plane.client()
    worker = plane.spawn(token_delay_s=0.01)
    base, one = await base_of(client), await load(client, adapter(plane, 1))
    stream = Stream(client, worker.instance_id, PROMPT, 3000, adapter="a")
    await stream.more()
    two = await load(client, adapter(plane, 2), "swap")
    for _ in range(3):
        await stream.more()
    await client.run("abort_requests", {})
    await stream.end()
    first, second = stream.spans
    assert (first["digest"], second["digest"]) == (base["digest"], base["digest"])
    assert (first["adapter"]["sequence"], second["adapter"]["sequence"]) == (1, 2)
    for span, version in ((first, one), (second, two)):
        places = range(span["start"], span["end"])
        made = [fake_token(base["digest"], PROMPT, n, 512, version["digest"]) for n in places]
        assert stream.tokens[span["start"] : span["end"]] == made


# ---- back ----


async def test_a_rollback_restores_an_adapter_or_the_base_alone(plane: Plane) -> None:
    client = await plane.client()
    ids = plane.spawn_copies(2)
    zero = await base_of(client)
    one = await load(client, adapter(plane, 1))
    two = await load(client, adapter(plane, 2), "swap")
    base = (await client.run("update_weights", update_of(plane.model(1), "step_1")))["version"]
    back = (await client.run("update_weights", {"rollback": {"sequence": one["sequence"]}}))["version"]
    assert (back["sequence"], back["label"], back["digest"]) == (4, one["label"], one["digest"])
    await all_proven(client, ids, base, a=back)
    first = (await client.run("update_weights", {"rollback": {"sequence": 0}}))["version"]
    assert (first["sequence"], first["digest"]) == (5, zero["digest"])
    await all_proven(client, ids, first, a=back)
    await client.run("unload_lora_adapter", {"lora_name": "a"})
    again = (await client.run("update_weights", {"rollback": {"sequence": two["sequence"]}}))["version"]
    assert (again["sequence"], again["digest"]) == (7, two["digest"])
    await all_proven(client, ids, first, a=again)
    with pytest.raises(Conflict):
        await client.run("update_weights", {"rollback": {"sequence": 6}})
    entries = (await client.run("updates"))["updates"]
    assert [entry["target"]["op"] for entry in entries[:2]] == ["load", "unload"]
    assert [entry["rollback"] for entry in entries if entry.get("rollback")] == [
        {"sequence": two["sequence"]},
        {"sequence": 0},
        {"sequence": one["sequence"]},
    ]


async def test_one_client_prepares_an_adapter_and_another_completes(plane: Plane) -> None:
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    base = await base_of(one)
    await one.run("prepare_weights_update", target("load", "a", adapter(plane, 1)))
    await all_proven(two, ids, base)
    version = (await two.run("complete_weights_update"))["version"]
    await all_proven(one, ids, base, a=version)
    await two.run("prepare_weights_update", target("unload", "a"))
    await all_proven(one, ids, base, a=version)
    await one.run("complete_weights_update")
    await all_proven(two, ids, base)


async def test_updates_of_adapters_and_base_one_after_another_stay_apart(plane: Plane) -> None:
    """Two trainers each publish an adapter of their own. A trainer that waits for the lock tries again."""
    one, two = await plane.client("one"), await plane.client("two")
    ids = plane.spawn_copies(2)
    base = await base_of(one)

    async def train(client: RlClient, name: str) -> dict[str, Any]:
        version: dict[str, Any] = {}
        for step in range(3):
            path = adapter(plane, 10 * step + ord(name))
            version = {}
            while not version:
                with contextlib.suppress(Locked):
                    version = await load(client, path, "swap" if step else "load", name)
        return version

    a, b = await asyncio.gather(train(one, "a"), train(two, "b"))
    await all_proven(one, ids, base, a=a, b=b)
    assert max(a["sequence"], b["sequence"]) == 6
    assert model_digest(plane.model()) == base["digest"]
