"""One fleet of `hf`, vLLM and SGLang, and each way by which weights reach all three at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import httpx
import psutil
import pytest

from rl_plane.client import RlClient
from rl_plane.errors import PlaneError, UpdateAborted
from tests.conftest import lives
from tests.support import each_transport, group_trainer, ipc_trainer, nixl_trainer, verl_client
from tests.support import ipc_memory as ipc
from tests.support import nixl_trainers as nixl
from tests.support.commanded_process import CommandedProcess
from tests.support.dialect_facade import facade, fine
from tests.support.fleet_updates import all_serve, states, update_of
from tests.support.free_port import free_port
from tests.support.group_pushes import Pushing
from tests.support.ipc_memory import trainer_of
from tests.support.mixed_fleet import (
    ARGUMENTS,
    END_S,
    ENDLESS,
    ENGINES,
    HEAL_S,
    PROMPT,
    START_S,
    Mixed,
    begun,
    client,
    http,
    mixed,
    proven,
    seed_of,
    witnessed,
)
from tests.support.nixl_trainers import trainer
from tests.support.phase_hooks import VARIABLE
from tests.support.sharing_trainer import SharingTrainer
from tests.support.streaming_client import Streaming
from tests.support.vllm_trainer import VllmTrainer
from worker.exit_codes import ENGINE_DEAD
from worker.testing.tiny_model import witness_next_token

__all__ = ["client", "http", "mixed", "trainer", "trainer_of"]

pytestmark = [pytest.mark.engines("vllm", "sglang", "trl"), pytest.mark.alone, pytest.mark.timeout(600)]

PARTS = 3
"""The calls of an update."""


# by which ways weights come, into all three at once


@pytest.mark.parametrize("backend", each_transport.BACKENDS)
async def test_each_transport_brings_weights_and_adapters(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, backend: str
) -> None:
    await each_transport.bring(mixed, client, http, backend)
    await mixed.witnessed(client)


async def test_weights_and_adapters_come_by_url(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    await each_transport.bring_by_url(mixed, client, http)
    await mixed.witnessed(client)


async def test_ipc_updates_reach_all_three_engines(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, trainer_of: Callable[..., ipc_trainer.Trainer]
) -> None:
    many, label = len(mixed.ids), {"policy": {"staging": "none"}, "version": "ipc 2"}
    await mixed.witnessed(client)  # from where it can be fetched again
    await ipc.published(client, trainer_of(mixed.base(2), many), label)
    await proven(http, mixed, "ipc 2", mixed.base(2))
    own = trainer_of(mixed.base(3), many, layout="tensors", bucket_bytes=each_transport.BUCKET_BYTES)
    await ipc.published(client, own, {"version": "ipc 3"})
    await proven(http, mixed, "ipc 3", mixed.base(3))
    killed = trainer_of(mixed.tiny(1), many, holds=[ipc.MIDDLE])
    update, _ = await ipc.holding(client, killed, "killed")
    killed.kill()
    with pytest.raises(UpdateAborted, match="trainer is gone"):
        await update
    await proven(http, mixed, "ipc 3", mixed.base(3))
    await mixed.witnessed(client)


async def test_updates_for_one_sglang_server_reach_all_three_engines(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await each_transport.bring_call_by_call(mixed, client, http)


async def test_tensors_shared_by_sglangs_serializer_reach_all_three_engines(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    """A list, a list that SGLang takes directly, and flattened buckets: each in three calls, from another process."""
    await mixed.witnessed(client)
    ways = (("list", None, 2), ("parameters", "direct", 3), ("bucket", "flattened_bucket", 2))
    with SharingTrainer(mixed.plane) as own:
        async with facade(mixed.plane) as admin:
            for how, load_format, seed in ways:
                for part in range(PARTS):
                    elements = await own.shared(mixed.base(seed), parts=PARTS, part=part, how=how, ranks=2)
                    body = {
                        "serialized_named_tensors": elements,
                        "load_format": load_format,
                        "weight_version": how,
                    }
                    told = fine(await admin.post("/update_weights_from_tensor", json=body))
                    assert ("weight_version" in told) == (part == PARTS - 1)
                    assert await own.drop() == []
                await proven(http, mixed, how, mixed.base(seed))
    await mixed.witnessed(client)


@pytest.mark.engines("nixl")
async def test_nixl_updates_reach_all_three_engines(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, trainer: Callable[..., nixl_trainer.Trainer]
) -> None:
    """A worker of each engine comes late, and heals from the trainer; one is killed, and heals from another worker."""
    ids: dict[str, str] = {}
    view = await client.view()

    async def heal(engine: str, label: str) -> None:
        """Heals one worker at a time, because a second worker of each engine together needs more memory than some
        machines have."""
        late = mixed.plane.spawn(
            ready=False, engine=engine, model=mixed.first, instance_id=ids.get(engine), **ARGUMENTS[engine]
        )
        ids[engine] = (await asyncio.to_thread(late.wait_ready, START_S)).instance_id
        await mixed.plane.until(lambda: all_serve(client, label), HEAL_S)
        await proven(http, replace(mixed, ids={engine: ids[engine]}), label, mixed.base(seed_of(label)))
        late.kill()
        await mixed.plane.until(lambda: view.member(ids[engine]) is None)

    source = trainer()
    transport = await source.offers(mixed.base(2), bucket_bytes=1 << 16)
    await client.run("update_weights", nixl.update_of(transport, "nixl 2"))  # no worker keeps it
    await source.keeps()
    for engine in ENGINES:
        await heal(engine, "nixl 2")
    transport = await source.offers(mixed.base(3), bucket_bytes=1 << 16)
    await client.run("update_weights", nixl.update_of(transport, "nixl 3", keep_staged=True))
    await source.keeps()
    transport = await source.offers(mixed.tiny(2), bucket_bytes=1 << 16)
    source.kill()
    with pytest.raises(PlaneError, match="source_gone"):
        await client.run("update_weights", nixl.update_of(transport, "never"))
    await proven(http, mixed, "nixl 3", mixed.base(3))
    await heal("vllm", "nixl 3")
    await mixed.witnessed(client)


async def test_broadcast_updates_reach_all_three_engines_while_they_generate(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    for base in (mixed.base(2), mixed.base(3)):
        assert base.is_dir()  # now: making it would hold up this loop, and with it the streams
    streams = list((await begun(client, mixed)).values())

    async def generate_on() -> None:
        for stream in streams:
            await stream.more()

    with group_trainer.Trainer(mixed.plane) as trainer:
        pushing = Pushing(client, trainer)
        await pushing.prepare(mixed.base(2), "group 2")
        await generate_on()
        await trainer.do("send", 2)
        await generate_on()
        await trainer.do("send")
        await trainer.do("finish")
        await trainer.do("close")
        await generate_on()
        await client.run("complete_weights_update")
        for stream in streams:
            stream.stop()
        await proven(http, mixed, "group 2", mixed.base(2))
        # Killed in the middle: the engines live, and the next trainer's update comes.
        await pushing.prepare(mixed.base(3), "group 3")
        await trainer.do("send", 1)
        trainer.kill()
        with pytest.raises(Exception, match="broke"):
            await client.run("complete_weights_update")
        await proven(http, mixed, "group 2", mixed.base(2))
    with group_trainer.Trainer(mixed.plane) as again:
        await Pushing(client, again).push(mixed.base(3), "group 3")
    await proven(http, mixed, "group 3", mixed.base(3))
    await mixed.witnessed(client)


async def test_trainers_own_clients_drive_all_three(
    client: RlClient, http: httpx.AsyncClient, mixed: Mixed
) -> None:
    """vLLM's and TRL's, unchanged: each takes the facade for one vLLM. Each meets a worker that is killed in the
    middle, and brings its update again to the rest."""
    await mixed.witnessed(client)

    async def form(trainer: CommandedProcess, group: str, ranks: int, seed: int) -> None:
        told = {
            "directory": str(mixed.base(seed)),
            "master_port": free_port(),
            "world_size": 1 + ranks,
            "group_name": group,
            "timeout_s": 30.0,
            "packed": True,
            "packed_buffer_size_bytes": 20_000,
        }
        await trainer.do("init", told)

    async with facade(mixed.plane) as steered:
        url = str(steered.base_url).rstrip("/")
        with VllmTrainer(mixed.plane) as trainer:
            label, before = "base 1", 1
            for kind, seed in (("vllm", 2), ("trl", 3)):
                doomed = await asyncio.to_thread(mixed.plane.spawn, ready=False, engine="hf", model=mixed.first)
                await asyncio.to_thread(doomed.wait_ready, START_S)
                await trainer.do("client", {"kind": kind, "url": url})
                await form(trainer, f"{kind}, with one more", len(mixed.ids) + 1, seed)
                if kind == "trl":
                    await trainer.do("call", ["pause"])
                await trainer.do("call", ["start_weight_update"])
                await trainer.do("part", [0, 3])
                doomed.kill()
                with pytest.raises(PlaneError, match="409"):
                    await trainer.do("part", [1, 3])
                if kind == "trl":
                    await trainer.do("call", ["resume"])
                await proven(http, mixed, label, mixed.base(before))
                await form(trainer, f"{kind}, without it", len(mixed.ids), seed)
                await trainer.do("send")
                label, before = (await client.run("weight_version"))["version"]["label"], seed
                await proven(http, mixed, label, mixed.base(seed))


@pytest.mark.skipif(not verl_client.MODULE.exists(), reason="verl's client is not there: make engines")
async def test_verls_own_client_drives_all_three(
    client: RlClient, http: httpx.AsyncClient, mixed: Mixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's unchanged client of one SGLang sends buckets and adapters as safetensors, and tensors that it shares by
    SGLang's serializer. A pickle of anything else is refused. One worker is killed between two buckets, which only the
    frontend has yet, and another while all workers stage them."""
    await mixed.witnessed(client)
    view = await client.view()
    holds = mixed.plane.tmp / "holds"
    holds.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, str(holds))
        doomed = [mixed.plane.spawn(ready=False, engine="hf", model=mixed.first) for _ in range(2)]
    for one in doomed:
        await asyncio.to_thread(one.wait_ready, START_S)

    async def served(seed: int) -> None:
        """Checks what each of the three engines serves, as its own client sees it."""
        version = (await client.run("weight_version"))["version"]
        await proven(http, mixed, version["label"], mixed.base(seed))
        assert await verl.do("generate") == witnessed(seed, verl_client.TOKENS)

    async with facade(mixed.plane) as steered:
        with verl_client.VerlClient(mixed.plane, str(steered.base_url), mixed.first) as verl:
            with pytest.raises(PlaneError, match="400"):
                await verl.do("pickled")
            await verl.do("shared", str(mixed.base(3)))
            await verl.do("flush")
            await served(3)
            await verl.do("shared", str(mixed.base(1)))
            await served(1)
            await verl.bucket(mixed.base(2), 0)
            doomed[0].kill()
            await mixed.plane.until(lambda: view.member(doomed[0].instance_id) is None)
            await served(1)
            for number in range(1, verl_client.BUCKETS):
                await verl.bucket(mixed.base(2), number)
            await verl.do("flush")
            await served(2)
            # With the last one the update begins, everywhere at once.
            point = f"prepare_update.after.{doomed[1].instance_id}"
            (holds / point).touch()
            for number in range(verl_client.BUCKETS - 1):
                await verl.bucket(mixed.base(3), number)
            last = asyncio.create_task(verl.bucket(mixed.base(3), verl_client.BUCKETS - 1))
            await mixed.plane.until((holds / f"reached.{point}").exists, END_S)
            doomed[1].kill()
            with pytest.raises(PlaneError, match="409"):
                await last
            await served(2)
            await verl.bring(mixed.base(3))
            await served(3)
            await verl.bring(mixed.base(1))
            await served(1)
            assert "verl" in await verl.do("adapt", str(mixed.adapter(1)))
            await verl.do("abort")
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    digest = (await client.run("weight_version"))["adapters"]["verl"]["digest"]
    await proven(http, mixed, "tiny 1", mixed.tiny(1), ("verl", mixed.adapter(1)), digest)
    await client.run("update_weights", {"target": {"kind": "lora", "op": "unload", "name": "verl"}})


async def test_a_choice_outlives_the_workers_and_the_weights_that_made_it(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    """The last test: it leaves `hf` alone. A worker is killed. Then the engine of another worker loses a process, and
    that worker ends itself. How they recover: tests/kill/test_engine_kills.py."""
    await mixed.witnessed(client)
    before, after = 1, 2
    workers = {
        engine: next(one for one in mixed.plane.spawned if one.instance_id == mixed.ids[engine])
        for engine in ENGINES
    }
    families = [
        one
        for engine in ("vllm", "sglang")
        for one in psutil.Process(workers[engine].process.pid).children(recursive=True)
    ]
    update = update_of(mixed.base(after), f"base {after}")
    await client.run("disable", {"workers": [mixed.ids["sglang"], mixed.ids["hf"]]})
    body = {"max_tokens": ENDLESS["sglang"], "temperature": 0, "ignore_eos": True, "migrate": True}
    async with Streaming(http, **body) as stream:
        await stream.until(lambda stream: len(stream.tokens) >= 20)
        workers["vllm"].kill()
        await client.run("update_weights", update)
        for engine, doomed in (("sglang", "sglang::scheduler"), ("hf", None)):
            await client.run("enable", {"workers": [mixed.ids[engine]]})
            await stream.until(lambda stream, engine=engine: stream.last["instance_id"] == mixed.ids[engine])  # type: ignore[misc]
            if doomed is not None:
                next(one for one in families if lives(one) and one.name().startswith(doomed)).kill()
                assert await asyncio.to_thread(workers[engine].process.wait, END_S) == ENGINE_DEAD
        await client.run("abort_requests", {})
        await stream.end()
    assert (stream.error, stream.last["finish_reason"]) == (None, "abort")
    makers = stream.last["instances"]
    assert [maker["instance_id"] for maker in makers] == [mixed.ids[engine] for engine in ("vllm", "sglang", "hf")]
    seam = makers[1]["start"]
    spans = [(seed_of(span["version"]), span["start"], span["end"]) for span in stream.spans]
    assert spans == [(before, 0, seam), (after, seam, len(stream.tokens))]
    last = PROMPT[-1]
    for place, token in enumerate(stream.tokens):
        last = witness_next_token(before if place < seam else after, last)
        assert token == last, place
    await mixed.plane.until(lambda: not any(map(lives, families)))
    assert {state["engine"] for state in (await states(client)).values()} == {"hf"}
    await client.run("resume", {})
