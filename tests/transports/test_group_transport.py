"""Weights that a trainer in another process broadcasts: both phases, what may die in them, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from frontend.server.options import FrontendOptions
from rl_plane.errors import (
    InvalidRequest,
    InvalidWeights,
    Locked,
    MembershipChanged,
    PlaneError,
    Unavailable,
    Unsupported,
    UpdateAborted,
)
from rl_plane.protocol.envelope import MAX_MESSAGE_BYTES
from rl_plane.protocol.versions import HostTensor, TensorSpec
from rl_plane.transports.base import TransportContext
from rl_plane.transports.group.rank_layout import Place
from rl_plane.transports.group.receiver import GlooTransport
from rl_plane.transports.group.sender import GroupSender
from rl_plane.transports.group.torch_group import AHEAD
from rl_plane.transports.packing import Tensor, fill, raw_bytes, spec_of
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.manifest import Manifest, pack
from tests.conftest import stop_process
from tests.support.broadcast_trainer import HOST, BroadcastTrainer, parts_of
from tests.support.dialect_facade import facade, fine, refused, served
from tests.support.faults import Stream
from tests.support.fleet_updates import all_serve, states
from tests.support.free_port import free_port
from tests.support.frontend_here import started
from tests.support.frontend_process import frontend
from tests.support.group_pushes import BUCKET, Pushing, send_all
from tests.support.group_trainer import Trainer
from tests.support.hf_fleet import ENDLESS, PROMPT, Witnesses, chain, proven
from tests.support.plain_client import plain_client
from tests.support.sglang_replay import Replay
from worker.receive.weight_receiver import load_transports

if TYPE_CHECKING:
    from rl_plane.client import RlClient
    from rl_plane.membership.worker_calls import WorkerCalls
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MANY_TENSORS = 20_000
"""Each takes a hundred bytes of a manifest."""
MANY_BYTES = 16 << 20
"""More than a socket holds."""
IN_THE_MIDDLE_S = 1.0
"""Time to begin to send; a trainer that has not even begun would prove less, not something else."""
SETTLE_S = 60.0
LONG_S = 600.0
"""Longer than the test may take."""
OF_A_DEATH = "is gone|broke off|could not begin"
LORA = {"target": {"kind": "lora", "op": "load", "name": "a"}}


def models(plane: Plane, nbytes: int = BUCKET) -> tuple[Path, Path]:
    """Two fake models of several buckets each."""
    return plane.model(1, tensors=5, nbytes=nbytes), plane.model(2, tensors=5, nbytes=nbytes)


async def test_base_and_adapter_reach_two_workers_while_they_generate(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    client = await plane.client()
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    with Trainer(plane) as trainer:
        pushing = Pushing(client, trainer)
        stream = Stream(client, ids[0], PROMPT, ENDLESS, temperature=0.0)
        await stream.more()
        prepared = await pushing.prepare(witnesses.base(2), "two")
        assert prepared["ready"]
        assert prepared["digest"] is None
        await stream.more()  # listening, it generates on
        assert await trainer.do("send", 2) == 1
        await stream.more()
        last = await trainer.do("send")
        assert last >= 2
        digest = await trainer.do("finish")
        await trainer.do("close")
        await stream.more()
        reply = await client.run("complete_weights_update")
        assert reply["num_buckets_received"] == last + 1
        assert reply["version"]["digest"] == digest
        await stream.until(spans=2)
        stream.stop()
        change = stream.spans[1]["start"]
        assert stream.tokens[:change] == chain(PROMPT[-1], change, 1)
        async with frontend(plane, admission_wait_s=SETTLE_S) as http:
            await proven(http, ids, 2)
            await pushing.push(witnesses.adapter(3), "a three", **LORA)
            await proven(http, ids, 2, a=3)
            await pushing.push(witnesses.base(3), "three")
            await proven(http, ids, 3, a=3)
            # In one call, while the trainer sends.
            transport = await trainer.do("open", [str(witnesses.base(1)), BUCKET])
            update = asyncio.create_task(client.run("update_weights", {"transport": transport, "version": "one"}))
            await trainer.do("send")
            digest = await trainer.do("finish", "no digests")
            assert (await update)["version"]["digest"] == digest
            await proven(http, ids, 1, a=3)
    (entry, *_) = (await client.run("updates"))["updates"]
    assert entry["transport"] == {"backend": "gloo"}
    assert not entry["refetchable"]


async def test_a_trainer_that_stands_still_is_seen_and_an_operator_ends_its_update(plane: Plane) -> None:
    client, operator = await plane.client("trainer"), await plane.client("operator")
    model, other = models(plane)
    plane.spawn_copies(2, model=model)
    with Trainer(plane) as trainer:
        pushing = Pushing(client, trainer)
        prepared = await pushing.prepare(other, "two")
        assert await trainer.do("send", 2) == 1

        async def came() -> dict[str, Any] | None:
            found: dict[str, Any] | None = (await operator.run("state"))["update"]
            return found if found is not None and found["bytes"] == 2 * 2 * BUCKET else None

        found = await plane.until(came)
        assert (found["phase"], found["update_id"]) == ("receive", prepared["update_id"])
        assert found["waits_for"].startswith("the trainer's bytes, since ")
        assert found["total_bytes"] == 2 * 5 * BUCKET
        await operator.run("abort_weights_update", {"by": "an operator on host a"})
        with pytest.raises(UpdateAborted, match="aborted by an operator on host a"):
            await client.run("complete_weights_update", {"update_id": prepared["update_id"]})
        await trainer.do("close")
        reply = await pushing.push(other, "two")
    assert sum(reply["phases"].values()) > reply["phases"]["receive_s"] > 0


async def test_a_worker_that_joins_later_receives_by_the_next_group(plane: Plane) -> None:
    """Engines of two kinds are in one group. A worker that joins later is not in it; a new group forms by itself."""
    client = await plane.client()
    model, other = models(plane)
    ids = plane.spawn_copies(2, model=model)
    with Trainer(plane, stated=True) as trainer:
        pushing = Pushing(client, trainer)
        await pushing.push(other, "two")
        assert await all_serve(client, "two")
        late = plane.spawn(model=model)
        await plane.until(lambda: _is_listed(client, late.instance_id))
        transport = await trainer.do("open", [str(model), BUCKET])
        with pytest.raises(InvalidRequest, match="there is no gloo group") as refused:
            await client.run("prepare_weights_update", {"transport": transport})
        assert refused.value.facts["field"] == "transport.group"
        await trainer.do("close")
        await pushing.push(model, "three")  # the late worker lacked `two`, which no worker can fetch again
        assert await all_serve(client, "three")
        assert {*ids, late.instance_id} == {*(await states(client))}


async def test_a_manifest_longer_than_a_message_reaches_the_workers(plane: Plane) -> None:
    client = await plane.client()
    model, other = (plane.model(seed, tensors=MANY_TENSORS, nbytes=4) for seed in (1, 2))
    plane.spawn_copies(2, model=model)
    checkpoint = open_checkpoint(other)
    told = Manifest(pack(checkpoint.specs.items())).digested(checkpoint.tensor_digests()).to_wire()
    checkpoint.close()
    assert len(json.dumps(told)) > MAX_MESSAGE_BYTES
    with Trainer(plane, stated=True) as trainer:
        reply = await Pushing(client, trainer).push(other, "two")
        again = await client.run("complete_weights_update", {"update_id": reply["update_id"]})
        assert again["num_buckets_received"] == reply["num_buckets_received"]
    assert await all_serve(client, "two")


async def _is_listed(client: RlClient, instance_id: str) -> bool:
    return instance_id in await states(client)


async def test_a_trainer_updates_by_two_http_calls_or_by_worker_ops(plane: Plane) -> None:
    """The test makes the two calls as a trainer in another language does, and the ops beneath them on each worker."""
    client = await plane.client()
    model, other = models(plane)
    ids = plane.spawn_copies(2, model=model)
    options = FrontendOptions(plane.url, plane.namespace, plane.component, rl_port=0, http_port=None)
    with Trainer(plane) as trainer:
        fingerprint = await trainer.do("form")
        transport = await trainer.do("open inline", [str(other), BUCKET])
        async with (
            started(options) as urls,
            plain_client(base_url=f"{urls['rl_url']}/v1/rl/", timeout=60) as rl,
        ):
            body = {"transport": transport, "version": "two", "fingerprint": fingerprint}
            prepared = (await rl.post("prepare_weights_update", json=body)).json()
            assert (prepared["status"], prepared["ready"], prepared["digest"]) == ("ok", True, None)
            (entry, *_) = (await client.run("updates"))["updates"]
            assert entry["outcome"] == "prepared"
            await send_all(trainer)
            done = (await rl.post("complete_weights_update", json={"num_buckets": 5})).json()
            assert (done["status"], done["num_buckets_received"]) == ("ok", 5)
        assert await all_serve(client, "two")
        transport = await trainer.do("open", [str(model), BUCKET])
        view = await client.view()
        asked = {"update_id": "u", "transport": transport, "label": "three"}
        async with client.lock(view) as held:
            for one in ids:
                row = await client.call(one, "listen_update", asked, held=held)
                assert row.body == {"listening": True}
            await send_all(trainer)
            rows = [await client.call(one, "prepare_update", asked, held=held) for one in ids]
            assert [(row.body["tensors"], row.body["refetchable"]) for row in rows] == [(5, False)] * 2
            await client.call_all("abort_update", {"update_id": "u"}, held=held)
    await _is_as_before(client, ids, "two")


def test_a_tensor_that_fills_a_bucket_is_sent_from_where_it_lies() -> None:
    import torch

    tensors: dict[str, Tensor] = {f"large.{number}": torch.randn(BUCKET // 4) for number in range(2 * AHEAD)}
    tensors |= {"small": torch.ones(16), "beside": torch.ones(16), "uneven": torch.ones(BUCKET // 4 + 1)}
    tensors |= {"readonly": HostTensor(TensorSpec("U8", (BUCKET,)), memoryview(bytes(BUCKET)))}
    manifest = Manifest(pack(((name, spec_of(one)) for name, one in tensors.items()), BUCKET))
    sender, receiver = GroupSender(timeout_s=SETTLE_S), GlooTransport(TransportContext())

    def init(body: dict[str, Any]) -> dict[str, Any]:
        receiver.init({**body, "world_size": 2, "rank_offset": 1})
        return {"fingerprint": "f"}

    def send() -> None:
        delivery = receiver.open(sender.open(manifest), "base")
        lent = sender.lend(tensors)
        assert set(lent) == set(range(2 * AHEAD))
        came: dict[str, bytes] = {}
        packed: list[int] = []

        def receive() -> None:
            came.update((name, bytes(one.data)) for name, one in delivery.tensors())

        def buffer(number: int) -> memoryview:
            packed.append(number)
            return sender.buffer(number)

        receiving = threading.Thread(target=receive)
        receiving.start()
        digests: dict[str, str] = {}
        for number in fill(manifest, tensors.items(), buffer, digests, lent):
            sender.send(number)
            assert len(sender._under_way) <= AHEAD
        sender.finish(digests)
        receiving.join(SETTLE_S)
        assert came == {name: bytes(raw_bytes(one)) for name, one in tensors.items()}
        assert delivery.digest == manifest.digested(digests).digest
        assert packed == [number for number in range(len(manifest.buckets)) if number not in lent]
        sender.close()

    sender.form(init)
    try:
        send()
        send()
    finally:
        sender.destroy()
        receiver.destroy()


def test_nccl_is_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nccl" not in load_transports(TransportContext())
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    there = load_transports(TransportContext(), "cuda:1")["nccl"]
    with pytest.raises(InvalidRequest, match="does not answer"):  # no process listens
        there.init(
            {"group": "g", "master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "rank_offset": 1}
        )
    config = {"backend": "nccl", "group": "g", "master_address": "a", "master_port": 1, "world_size": 2}
    (place,) = Place.of_worker({**config, "rank_offset": 1}, "nccl", ("cuda:1",))
    assert place.device == "cuda:1"
    with pytest.raises(InvalidRequest, match="device"):
        Place.of_worker({**config, "rank_offset": 1, "device": "cuda:0"}, "nccl", ("cuda:1",))
    with pytest.raises(Unsupported):
        GroupSender("nccl")


# ---- what dies ----


async def _is_gone(client: RlClient, instance_id: str) -> bool:
    return instance_id not in await states(client)


async def test_a_death_in_the_middle_of_a_bucket_ends_the_update_at_once(plane: Plane) -> None:
    """A receiver that stands still takes no more than a socket holds, so the trainer stops in the middle of a bucket.
    The trainer dies, then a worker does. No process waits for a time-out."""
    client = await plane.client()
    model, other = models(plane, nbytes=MANY_BYTES)
    staying, frozen = plane.spawn_many(2, model=model)

    async def sending(trainer: Trainer) -> asyncio.Task[Any]:
        await Pushing(client, trainer).prepare(other, "two")
        frozen.stop()
        task = asyncio.create_task(trainer.do("send"))
        done, _ = await asyncio.wait([task], timeout=IN_THE_MIDDLE_S)
        assert not done
        return task

    with Trainer(plane, timeout_s=LONG_S) as trainer, Trainer(plane, timeout_s=LONG_S) as next_one:
        task = await sending(trainer)
        trainer.kill()
        with pytest.raises(AssertionError):
            await task
        frozen.go_on()
        with pytest.raises(UpdateAborted, match=OF_A_DEATH):
            await client.run("complete_weights_update")
        await plane.until(lambda: _serve(client, {staying.instance_id, frozen.instance_id}, "initial"), SETTLE_S)
        task = await sending(next_one)
        frozen.kill()
        with pytest.raises(Unavailable, match=OF_A_DEATH):
            await task
        with pytest.raises(UpdateAborted):
            await client.run("complete_weights_update")
        await plane.until(lambda: _serve(client, {staying.instance_id}, "initial"), SETTLE_S)
        await next_one.do("close")
        await Pushing(client, next_one).push(other, "two")
    assert await all_serve(client, "two")


async def test_a_trainers_child_that_outlives_it_delays_no_worker(plane: Plane) -> None:
    """A data loader, for example, is forked when the group was formed."""
    client = await plane.client()
    model, other = models(plane)
    ids = plane.spawn_copies(2, model=model)
    with contextlib.ExitStack() as ends, Trainer(plane, timeout_s=LONG_S) as trainer:
        await Pushing(client, trainer).prepare(other, "two")
        await trainer.do("send", 1)
        ends.callback(os.kill, await trainer.do("fork"), signal.SIGKILL)
        trainer.kill()
        async with asyncio.timeout(SETTLE_S):
            with pytest.raises(UpdateAborted, match=OF_A_DEATH):
                await client.run("complete_weights_update")
        await _is_as_before(client, ids, "initial")


async def test_a_worker_that_hangs_ends_the_update_after_the_time_out(plane: Plane) -> None:
    """Only a time-out can show that the worker hangs."""
    client = await plane.client()
    model, other = models(plane)
    staying, frozen = plane.spawn_many(2, model=model)
    with Trainer(plane, timeout_s=4.0) as trainer:
        pushing = Pushing(client, trainer)
        await pushing.prepare(other, "two")
        await trainer.do("send", 1)
        frozen.stop()
        with pytest.raises(PlaneError, match=r"too long|did not come|broke"):
            await send_all(trainer)
        await trainer.do("close")
        with pytest.raises(PlaneError):
            await client.run("complete_weights_update")
        frozen.go_on()
        await plane.until(lambda: _serve(client, {staying.instance_id, frozen.instance_id}, "initial"), SETTLE_S)
        await pushing.push(other, "two")
        await plane.until(lambda: all_serve(client, "two"))


async def test_a_trainer_that_hangs_ends_the_update_after_the_time_out(plane: Plane) -> None:
    """The trainer hangs in the middle of an update. Its receivers end after the group's `timeout_s`, and each says
    so."""
    client = await plane.client()
    model, other = models(plane)
    ids = plane.spawn_copies(2, model=model)
    with Trainer(plane, timeout_s=4.0) as trainer:
        pushing = Pushing(client, trainer)
        await pushing.prepare(other, "two")
        await trainer.do("send", 1)
        stop_process(trainer.process.pid)
        with pytest.raises(UpdateAborted, match=r"bucket \d of 5") as caught:
            await client.run("complete_weights_update")
        assert {row["instance_id"]: row["status"] for row in caught.value.facts["workers"]} == dict.fromkeys(
            ids, "error"
        )
        await _is_as_before(client, ids, "initial")
        os.kill(trainer.process.pid, signal.SIGCONT)
        with pytest.raises(PlaneError):
            await send_all(trainer)
        await trainer.do("close")
        await pushing.push(other, "two")
    assert await all_serve(client, "two")


async def _serve(client: WorkerCalls, ids: set[str], label: str) -> bool:
    return {*(await states(client))} == ids and await all_serve(client, label)


async def _is_as_before(client: RlClient, ids: list[str], label: str) -> None:
    found = await states(client)
    assert {*found} == {*ids}
    assert await all_serve(client, label)
    assert all(state["staged"] is None for state in found.values())


async def test_an_abort_ends_it_on_every_side(plane: Plane) -> None:
    client = await plane.client()
    model, other = models(plane)
    ids = plane.spawn_copies(2, model=model)
    with Trainer(plane) as trainer:
        pushing = Pushing(client, trainer)
        prepared = await pushing.prepare(other, "two")
        await trainer.do("send", 1)
        await client.run("abort_weights_update", {"update_id": prepared["update_id"]})
        with pytest.raises(Unavailable, match=r"gave up|did not take the whole update"):
            await send_all(trainer)
        await trainer.do("close")
        await _is_as_before(client, ids, "initial")
        await pushing.push(other, "two")


FORMING_BOUND_S = 90.0
"""Far more than it takes to import torch and to wait for two seconds; far less than without an end."""
FORMING_ENDS_SOON = """
from rl_plane.transports.group import torch_group
from rl_plane.transports.group import receiver as group
torch_group.FORM_MARGIN_S = 1.0
group.Group = lambda place, join_s: torch_group.Group(place, min(join_s, place.timeout_s))
"""


async def test_a_group_of_a_trainer_that_hangs_is_given_up_within_its_bound(plane: Plane) -> None:
    """The trainer's kernel accepts connections, and no process answers on them."""
    client = await plane.client()
    model, other = models(plane)
    ids = plane.spawn_copies(2, model=model, patch=FORMING_ENDS_SOON)
    with contextlib.ExitStack() as sockets:
        store, lifelines = (sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        announced = {
            "backend": "gloo",
            "master_address": "127.0.0.1",
            "master_port": store.getsockname()[1],
            "timeout_s": 1.0,
        }
        for more in (
            {"group": "without lifelines"},
            {"group": "with lifelines", "lifeline_port": lifelines.getsockname()[1], "secret": "s"},
        ):
            async with asyncio.timeout(FORMING_BOUND_S):
                with pytest.raises(PlaneError, match="not formed within 2 s"):
                    await client.run("init_transport", {**announced, **more})
        assert await all_serve(client, "initial")
        async with facade(plane, part_timeout_s=1.0) as http:
            await _a_group_of_its_own(http, ids, {**announced, "rank_offset": 1, "world_size": 3})
        assert await all_serve(client, "initial")
    with Trainer(plane) as trainer:
        await Pushing(client, trainer).push(other, "two")
    assert await all_serve(client, "two")


REFUSES = """
from pathlib import Path
from rl_plane.errors import Unsupported
from rl_plane.transports.group import receiver

def refusing(place=receiver.Place.of_worker):
    def of_worker(*given):
        if Path({file!r}).exists():
            raise Unsupported("there is no place here", field="transport.backend")
        return place(*given)
    return of_worker

receiver.Place.of_worker = refusing()
"""
"""Refuses to join a group while the file is there."""


async def test_a_worker_that_refuses_a_group_lets_no_other_wait(plane: Plane) -> None:
    """The refusal is reported at once. The other workers have not come to the trainer's own store, so they can still
    join it."""
    client = await plane.client()
    model, other = models(plane)
    refusal = plane.tmp / "refuses"
    refusal.touch()
    plane.spawn(model=model)
    refusing = plane.spawn(model=model, patch=REFUSES.format(file=str(refusal))).instance_id
    port = free_port()
    own = {"group_name": "g", "master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": 3}
    own["backend"] = "gloo"
    with BroadcastTrainer(plane) as trainer:
        order = {"group": "g", "port": port, "world_size": 3, "timeout_s": FORMING_BOUND_S}
        waiting = asyncio.create_task(trainer.do("form", order))
        async with facade(plane) as http:
            for path, body in (
                ("/init_weights_update_group", own),
                ("/init_weight_transfer_engine", {"init_info": own}),
            ):
                async with asyncio.timeout(FORMING_BOUND_S):
                    error = refused(await http.post(path, json=body), 409)
                assert error["message"].endswith(f"1 of 2 workers: {refusing}: there is no place here")
                assert "disabled" not in error
                assert await served(http) == [(True, "initial")] * 2
            refusal.unlink()
            fine(await http.post("/init_weights_update_group", json=own))
            await waiting
            (part,) = parts_of(other, 1)
            fine(await Replay(http, trainer).send("g", other, part, weight_version="own"))
            assert await served(http) == [(True, "own")] * 2
    refusal.touch()
    with Trainer(plane) as trainer:
        with pytest.raises(PlaneError, match=f"1 of 2 workers: {refusing}: there is no place here"):
            await trainer.do("form")
        refusal.unlink()
        await Pushing(client, trainer).push(model, "pushed")
    assert await all_serve(client, "pushed")


async def _a_group_of_its_own(http: httpx.AsyncClient, ids: list[str], info: dict[str, Any]) -> None:
    """Each route that forms a group is tried. A worker that failed to join gets no requests until it is enabled."""
    broadcaster = {"host": info["master_address"], "port": info["master_port"], "inference_world_size": 2}
    for path, body in (
        ("/init_weights_update_group", {**info, "group_name": "sglang"}),
        ("/init_weight_transfer_engine", {"init_info": {**info, "group_name": "vllm"}}),
        ("/init_broadcaster", {**broadcaster, "backend": "gloo", "timeout": 1.0}),
        ("/v1/rl/init_transport", {**info, "group": "by the plane's op", "form": "torch"}),
    ):
        async with asyncio.timeout(FORMING_BOUND_S):
            answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500 or path.startswith("/v1/rl/"), answer.text
        assert (error["disabled"], "/enable" in error["fix"]) == (ids, True), path
        rows = fine(await http.get("/v1/rl/state"))["workers"]
        assert [row["admission"]["reasons"] for row in rows] == [["disabled"]] * 2, path
        for one in ids:
            fine(await http.post(f"/v1/rl/workers/{one}/enable"))
    # Who refuses to come was not touched.
    wrong = {"init_info": {**info, "group_name": "vllm", "master_port": 0}}
    assert refused(await http.post("/init_weight_transfer_engine", json=wrong), 400)["field"]
    assert await served(http) == [(True, "initial")] * 2


# ---- what is refused ----


async def test_a_wrong_call_of_a_group_update_is_refused(plane: Plane) -> None:
    client = await plane.client()
    model, other = models(plane)
    ids = plane.spawn_copies(2, model=model)

    async def refused(
        op: str, body: dict[str, Any], field: str | None, kind: type[PlaneError] = InvalidRequest
    ) -> PlaneError:
        with pytest.raises(kind) as error:
            await client.run(op, body)
        assert error.value.facts.get("field") == field, error.value.facts
        assert error.value.facts["fix"]
        return error.value

    with Trainer(plane) as trainer:
        pushing = Pushing(client, trainer)
        fingerprint = await trainer.do("form")
        stored = await trainer.do("open", [str(other), BUCKET])
        transport = await trainer.do("open inline", [str(other), BUCKET])
        # The group: counted before any rank joins, and joined only if a trainer listens.
        announced = {"backend": "gloo", "group": "g", "master_address": "127.0.0.1", "master_port": 1}
        await refused("init_transport", {**announced, "world_size": 7}, "world_size")
        await refused("init_transport", {**announced, "rank_offset": 1}, "rank_offset")
        await refused("init_transport", announced, "master_port")
        await refused("init_transport", {**announced, "master_port": 0}, "master_port")
        await refused("init_transport", {**announced, "timeout_s": 0}, "timeout_s")
        await refused("init_transport", {**announced, "colour": "red"}, "colour")
        await refused("init_transport", {**announced, "lifeline_port": 1}, "secret")
        with pytest.raises(MembershipChanged):
            await client.run("init_transport", {**announced, "fingerprint": "another"})
        # Prepare.
        for wrong, field in (
            ({"group": "elsewhere"}, "transport.group"),
            ({"num_buckets": 1}, "transport.num_buckets"),
            ({"colour": "red"}, "transport.colour"),
            ({"manifest": None}, "transport.manifest"),
        ):
            await refused("prepare_weights_update", {"transport": {**transport, **wrong}}, field)
        for wrong, field in (
            ({"manifest": transport["manifest"]}, "transport.manifest_key"),
            ({"manifest_digest": None}, "transport.manifest_digest"),
            ({"num_buckets": None}, "transport.num_buckets"),
        ):
            await refused("prepare_weights_update", {"transport": {**stored, **wrong}}, field)
        nowhere = {"transport": {**stored, "manifest_key": "nowhere"}}
        await refused("prepare_weights_update", nowhere, None, UpdateAborted)
        other_names = {**transport["manifest"], "buckets": [[["x", "F32", [1]]]]}
        body = {"transport": {**transport, "manifest": other_names, "num_buckets": 1}}
        await refused("prepare_weights_update", body, "transport", InvalidWeights)
        unstaged = {"transport": transport, "policy": {"staging": "none"}}
        await refused("prepare_weights_update", unstaged, "policy.staging")
        await trainer.do("close")
        # Complete.
        await refused("complete_weights_update", {}, "update_id", UpdateAborted)
        prepared = await pushing.prepare(other, "two")
        assert await trainer.do("form") == fingerprint
        await refused("prepare_weights_update", {"transport": transport}, None, Locked)
        await refused("complete_weights_update", {"num_buckets": 1}, "num_buckets")
        await refused("complete_weights_update", {"digest": "blake3:0"}, "digest")
        await send_all(trainer)
        with pytest.raises(UpdateAborted, match="the caller stated"):
            await client.run("complete_weights_update", {"digest": "blake3:" + "0" * 64, **_id(prepared)})
        await _is_as_before(client, ids, "initial")
        await pushing.push(other, "two")
        assert await all_serve(client, "two")


def _id(prepared: dict[str, Any]) -> dict[str, Any]:
    return {"update_id": prepared["update_id"]}


async def test_other_bytes_than_were_stated_are_found(plane: Plane) -> None:
    """The receivers find them before anything is committed. A repeated call gets the same answer."""
    client = await plane.client()
    model, other = models(plane)
    plane.spawn_copies(2, model=model)
    with Trainer(plane, stated=True) as trainer:
        pushing = Pushing(client, trainer)
        fingerprint = await trainer.do("form")
        transport = await trainer.do("open inline", [str(other), BUCKET])
        digests = transport["manifest"]["tensor_digests"]
        first = next(iter(digests))
        transport["manifest"]["tensor_digests"] = {**digests, first: "0" * 32}
        await client.run("prepare_weights_update", {"transport": transport, "fingerprint": fingerprint})
        with pytest.raises(Unavailable, match="did not take the whole update"):
            await send_all(trainer)
        await trainer.do("close")
        with pytest.raises(InvalidWeights, match="its publisher stated"):
            await client.run("complete_weights_update")
        await pushing.push(other, "two")
        assert await all_serve(client, "two")
