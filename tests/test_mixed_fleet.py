"""One fleet of `hf`, `vllm` and `sglang` workers: a trainer can't tell them apart, and all serve what is committed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("peft")

from rl_plane.client import RlClient
from rl_plane.errors import PlaneError, UpdateAborted
from tests import each_transport, group_trainer, ipc_trainer, nixl_trainer
from tests import test_ipc_transport as ipc
from tests import test_nixl_transport as nixl
from tests.faults import Stream
from tests.reference import logprobs_of, prompt_logprobs
from tests.test_delta_fleet import by_delta
from tests.test_frontend_generation import ask, frontend
from tests.test_group_transport import Pushing
from tests.test_ipc_transport import trainer_of
from tests.test_nixl_transport import trainer
from tests.test_plane_update import all_serve, states, update_of
from worker.exit_codes import ENGINE_DEAD
from worker.tiny_adapter import make_tiny_adapter
from worker.tiny_model import VOCAB_SIZE, make_tiny_model, make_witness_model, witness_next_token

if TYPE_CHECKING:
    from tests.conftest import Plane

__all__ = ["trainer", "trainer_of"]

pytestmark = [pytest.mark.engines("vllm", "sglang"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
ENGINES = ("hf", "vllm", "sglang")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"max_lora_rank": "8", "max_model_len": "16384"},
    "sglang": {"max_lora_rank": "8"},
}
PROMPT = [5, 6, 7]
TOKENS = 10
LONG_PROMPT = 700
"""More than one step of `hf` prefills."""
LONG = 200
"""Tokens of a stream that lives through something."""
ENDLESS = {"hf": 8000, "vllm": 16000, "sglang": 6000}
"""More tokens than each makes meanwhile, and fewer than its cache holds."""
START_S = 240.0
"""Three engines that start side by side on two cores."""
HEAL_S = 90.0
END_S = 30.0
LOGPROB = 0.05
"""A batch of another shape rounds bfloat16 in another way; a wrong adapter is off by far more."""


@dataclass
class Mixed:
    plane: Plane
    first: Path
    ids: dict[str, str]
    """Engine → instance id."""

    def base(self, seed: int) -> Path:
        return make_witness_model(self.plane.tmp / "weights" / f"witness{seed}", seed, "bfloat16")

    def tiny(self, seed: int) -> Path:
        """What an adapter does shows in these: in a witness it is lost in the gap to the second token."""
        return make_tiny_model(self.plane.tmp / "weights" / f"tiny{seed}", seed, "bfloat16")

    def adapter(self, seed: int) -> Path:
        return make_tiny_adapter(self.first, self.plane.tmp / "weights" / f"adapter{seed}", seed=seed, r=4)

    async def witnessed(self, client: RlClient) -> None:
        """As each test finds it."""
        await client.run("update_weights", update_of(self.first, "base 1"))


@pytest.fixture(scope="module")
def mixed(make_plane: Callable[[], Plane]) -> Mixed:
    plane = make_plane()
    first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16")
    started = {
        engine: plane.spawn(ready=False, engine=engine, model=first, **ARGUMENTS[engine]) for engine in ENGINES
    }
    ids = {engine: one.wait_ready(START_S).instance_id for engine, one in started.items()}
    return Mixed(plane, first, ids)


@pytest_asyncio.fixture
async def client(mixed: Mixed) -> AsyncIterator[RlClient]:
    client = await RlClient.connect(mixed.plane.url, mixed.plane.namespace, mixed.plane.component)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def http(mixed: Mixed) -> AsyncIterator[httpx.AsyncClient]:
    async with frontend(mixed.plane, admission_wait_s=HEAL_S) as http:
        yield http


async def proven(
    http: httpx.AsyncClient, mixed: Mixed, label: str, base: Path, adapter: tuple[str, Path] | None = None
) -> None:
    """Each engine generates the tokens that are likeliest by the reference for this version, up to ties, with their
    logprobs, and names the version."""
    name, path = adapter if adapter is not None else (None, None)
    for engine, instance_id in mixed.ids.items():
        body: dict[str, Any] = {
            "prompt_token_ids": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "nvext": {"instance_id": instance_id},
        }
        (choice,) = (await ask(http, **body, **({"model": name} if name else {})))["choices"]
        tokens = choice["token_ids"]
        expected, gap = await asyncio.to_thread(logprobs_of, base, PROMPT, tokens, path)  # the loop serves NATS
        assert (len(tokens), gap <= LOGPROB) == (TOKENS, True), (engine, gap)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=LOGPROB), engine
        if path is not None and base.name.startswith("tiny"):
            assert logprobs_of(base, PROMPT, tokens)[1] > 10 * LOGPROB, "the bound tells the adapter"
        (span,) = choice["weight_versions"]
        assert (span["version"], span["start"], span["end"]) == (label, 0, TOKENS), engine


async def settled(client: RlClient, mixed: Mixed) -> str:
    """The label that all serve."""

    async def one() -> str:
        rows = [row for row in (await states(client)).values() if row["ready"]]
        labels = {str(row["applied_weight_version"]) for row in rows}
        return labels.pop() if len(labels) == 1 and len(rows) == len(mixed.ids) else ""

    return str(await mixed.plane.until(one, HEAL_S))


async def test_every_engine_serves_each_version_of_a_sequence(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await proven(http, mixed, "initial", mixed.first)
    for seed in (2, 3):
        await client.run("update_weights", update_of(mixed.base(seed), f"base {seed}"))
        await proven(http, mixed, f"base {seed}", mixed.base(seed))
    # An adapter, loaded, swapped and, with the base beneath it changed, still there.
    for seed in (1, 2):
        await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(seed))})
        await proven(http, mixed, "base 3", mixed.base(3), ("style", mixed.adapter(seed)))
        await proven(http, mixed, "base 3", mixed.base(3))
    await client.run("update_weights", {"rollback": {"label": "base 2"}, "version": "base 2"})
    await proven(http, mixed, "base 2", mixed.base(2), ("style", mixed.adapter(2)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await proven(http, mixed, "base 2", mixed.base(2))
    refused = await http.post("/v1/completions", json={"prompt": "hi", "model": "style"})
    assert refused.status_code == 404
    rolled = update_of(mixed.base(1), "base 1", barrier="rolling")
    await client.run("update_weights", rolled)
    await proven(http, mixed, "base 1", mixed.base(1))


async def test_every_engine_applies_deltas_to_what_it_keeps(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    one, two, three = map(mixed.base, (1, 2, 3))
    await client.run("update_weights", update_of(two, "base 2", keep_staged=True))
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(1))})
    for old, new, label in ((two, three, "base 3"), (three, one, "base 1")):
        body = by_delta(mixed.plane, old, new, label)
        with pytest.raises(PlaneError, match="the delta makes"):
            await client.run("update_weights", {**body, "digest": "blake3:" + "0" * 64})
        await client.run("update_weights", body)
        await proven(http, mixed, label, new)
        await proven(http, mixed, label, new, ("style", mixed.adapter(1)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})


def seed_of(label: str) -> int:
    return 1 if label == "initial" else int(label.split()[-1])


def _truncated(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])


def _without_one(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors")


def _other_shape(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("spoil", [_truncated, _without_one, _other_shape, shutil.rmtree])
async def test_a_bad_checkpoint_is_refused_and_touches_no_engine(
    spoil: Callable[[Path], None], mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    label = await settled(client, mixed)
    bad = mixed.plane.tmp / "weights" / f"bad-{spoil.__name__}"
    shutil.copytree(mixed.base(2), bad)
    spoil(bad)
    with pytest.raises(PlaneError) as caught:
        await client.run("update_weights", update_of(bad, "bad"))
    assert caught.value.http_status == 400, caught.value
    assert await settled(client, mixed) == label
    await proven(http, mixed, label, mixed.base(seed_of(label)))


def witnessed(seed: int, count: int) -> list[int]:
    tokens, last = [], PROMPT[-1]
    for _ in range(count):
        last = witness_next_token(seed, last)
        tokens.append(last)
    return tokens


async def begun(client: RlClient, mixed: Mixed, tokens: int | None = None) -> dict[str, Stream]:
    """A stream on each engine, that has its first tokens; without `tokens` it outlasts what comes. The fastest last."""
    streams = {}
    for engine in ("sglang", "vllm", "hf"):
        many = tokens or ENDLESS[engine]
        streams[engine] = Stream(client, mixed.ids[engine], PROMPT, many, temperature=0.0, ignore_eos=True)
        await streams[engine].more()
    return streams


async def test_streams_go_on_after_a_pause_that_keeps_them(mixed: Mixed, client: RlClient) -> None:
    base = seed_of(await settled(client, mixed))
    streams = await begun(client, mixed)
    await client.run("pause", {"mode": "keep"})
    had = {engine: len(stream.tokens) for engine, stream in streams.items()}
    late = {
        engine: Stream(client, one, PROMPT, 4, temperature=0.0, ignore_eos=True)
        for engine, one in mixed.ids.items()
    }
    await client.run("resume", {})
    for engine, stream in streams.items():
        await stream.until(tokens=had[engine] + 20)
        stream.stop()
        assert stream.tokens == witnessed(base, len(stream.tokens)), engine
    for engine, one in late.items():
        assert (await one.end()).tokens == witnessed(base, 4), engine


async def test_a_pause_that_waits_lets_streams_end(mixed: Mixed, client: RlClient) -> None:
    base = seed_of(await settled(client, mixed))
    streams = await begun(client, mixed, LONG)
    await client.run("pause", {"mode": "wait"})
    await client.run("resume", {})
    for engine, stream in streams.items():
        await stream.end()
        assert (stream.finish_reason, stream.tokens) == ("length", witnessed(base, LONG)), engine


async def test_a_pause_that_aborts_gives_the_tokens_so_far(mixed: Mixed, client: RlClient) -> None:
    base = seed_of(await settled(client, mixed))
    streams = await begun(client, mixed)
    await client.run("pause", {"mode": "abort"})
    for engine, stream in streams.items():
        await stream.end()
        assert stream.finish_reason == "abort", engine
        assert 0 < len(stream.tokens) < ENDLESS[engine], engine
        assert stream.tokens == witnessed(base, len(stream.tokens)), engine
        (span,) = stream.spans
        assert span["end"] == len(stream.tokens), engine
    await client.run("resume", {})


async def test_a_stream_that_is_kept_across_an_update_tells_which_weights_made_which_tokens(
    mixed: Mixed, client: RlClient
) -> None:
    before = seed_of(await settled(client, mixed))
    after = before % 3 + 1
    streams = await begun(client, mixed)
    await client.run("update_weights", update_of(mixed.base(after), f"base {after}"))
    for engine, stream in streams.items():
        await stream.until(spans=2)
        stream.stop()
        assert [seed_of(span["version"]) for span in stream.spans] == [before, after], engine
        last, change = PROMPT[-1], stream.spans[1]["start"]
        for place, token in enumerate(stream.tokens):
            last = witness_next_token(before if place < change else after, last)
            assert token == last, (engine, place, change)


async def test_prompt_logprobs_are_the_references(mixed: Mixed, client: RlClient, http: httpx.AsyncClient) -> None:
    # Not a witness: its logits are so large that one step of bfloat16 is more than the bound.
    weights = mixed.plane.tmp / "weights"
    base = mixed.tiny(1)
    adapter = make_tiny_adapter(base, weights / "tiny-adapter", seed=3)
    await client.run("update_weights", update_of(base, "tiny 1"))
    await client.run("load_lora_adapter", {"lora_name": "scored", "lora_path": str(adapter)})
    pick = random.Random(7)
    prompt = [pick.randrange(3, VOCAB_SIZE) for _ in range(LONG_PROMPT)]
    truth = {
        name: await asyncio.to_thread(prompt_logprobs, base, prompt, path)
        for name, path in ((None, None), ("scored", adapter))
    }
    # What is compared must tell the two apart.
    assert max(abs(one - other) for one, other in zip(*truth.values(), strict=True)) > 4 * LOGPROB
    for engine, instance_id in mixed.ids.items():
        for name in truth:
            body: dict[str, Any] = {"prompt_token_ids": prompt, "max_tokens": 2, "temperature": 0.5, "seed": 1}
            body |= {"nvext": {"instance_id": instance_id}, **({"model": name} if name else {})}
            await ask(http, **body)  # from here on the prompt is in the prefix cache
            reply = await ask(http, **body, n=2, prompt_logprobs=0)
            for choice in reply["choices"]:
                first, *rows = choice["prompt_logprobs"]
                assert first is None, engine
                assert [list(row) for row in rows] == [[str(token)] for token in prompt[1:]], engine
                told = [row[str(token)]["logprob"] for row, token in zip(rows, prompt[1:], strict=True)]
                off = [abs(one - other) for one, other in zip(told, truth[name], strict=True)]
                assert max(off) < LOGPROB, (engine, name, off)
            alone = await ask(http, **{**body, "prompt_token_ids": prompt[:1]}, prompt_logprobs=0)
            assert alone["choices"][0]["prompt_logprobs"] == [None], engine
    await client.run("unload_lora_adapter", {"lora_name": "scored"})
    await mixed.witnessed(client)


async def test_describe_says_the_same_of_all(mixed: Mixed, client: RlClient) -> None:
    rows = {row["instance_id"]: row for row in (await client.run("describe"))["workers"]}
    told = {engine: rows[one] for engine, one in mixed.ids.items()}
    assert {row["status"] for row in told.values()} == {"ok"}, told
    assert {engine: row["engine"] for engine, row in told.items()} == {engine: engine for engine in ENGINES}
    for key in ("dtype", "vocab_size", "tensors", "weight_bytes", "world_size", "version"):
        assert len({json.dumps(row[key]) for row in told.values()}) == 1, key


async def test_the_page_of_engines_has_what_they_say(mixed: Mixed, client: RlClient) -> None:
    """Else: python docs/generate_engines.py, by a fleet that was started like this one."""
    rows = (await client.run("describe"))["workers"]
    spec = importlib.util.spec_from_file_location("generate_engines", ROOT / "docs" / "generate_engines.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = (ROOT / "docs" / "engines.md").read_text()
    assert page == generate.with_table(page, rows)


async def test_weights_that_are_written_over_the_served_ones(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient
) -> None:
    await client.run("update_weights", update_of(mixed.tiny(1), "tiny 1"))
    await client.run("load_lora_adapter", {"lora_name": "style", "lora_path": str(mixed.adapter(1))})
    await client.run("update_weights", update_of(mixed.tiny(2), "tiny 2", staging="none"))
    await proven(http, mixed, "tiny 2", mixed.tiny(2), ("style", mixed.adapter(1)))
    # What turns out to be another than was said, when it is half-way in, is not kept.
    spoilt = {**update_of(mixed.tiny(1), "spoilt", staging="none"), "digest": "blake3:" + "0" * 64}
    with pytest.raises(PlaneError, match="blake3"):
        await client.run("update_weights", spoilt)
    await mixed.plane.until(lambda: all_serve(client, "tiny 2"), HEAL_S)
    await proven(http, mixed, "tiny 2", mixed.tiny(2), ("style", mixed.adapter(1)))
    await client.run("unload_lora_adapter", {"lora_name": "style"})
    await mixed.witnessed(client)


# by which ways weights come, into all three at once


@pytest.mark.parametrize("backend", each_transport.BACKENDS)
async def test_each_transport(mixed: Mixed, client: RlClient, http: httpx.AsyncClient, backend: str) -> None:
    await each_transport.bring(mixed, client, http, backend)
    await mixed.witnessed(client)


async def test_what_is_shared_on_one_machine(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, trainer_of: Callable[..., ipc_trainer.Trainer]
) -> None:
    many, label = len(mixed.ids), {"policy": {"staging": "none"}, "version": "ipc 2"}
    await mixed.witnessed(client)  # from where it can be fetched again
    await ipc.published(client, trainer_of(mixed.base(2), many), label)
    await proven(http, mixed, "ipc 2", mixed.base(2))
    killed = trainer_of(mixed.tiny(1), many, holds=[ipc.MIDDLE])
    update, _ = await ipc.holding(client, killed, "killed")
    killed.kill()
    with pytest.raises(UpdateAborted, match="trainer has gone"):
        await update
    await proven(http, mixed, "ipc 2", mixed.base(2))
    await mixed.witnessed(client)


@pytest.mark.engines("nixl")
async def test_what_is_pulled_from_memory(
    mixed: Mixed, client: RlClient, http: httpx.AsyncClient, trainer: Callable[..., nixl_trainer.Trainer]
) -> None:
    source = trainer()
    transport = await source.offers(mixed.base(2), bucket_bytes=1 << 16)
    await client.run("update_weights", nixl.update_of(transport, "nixl 2", keep_staged=True))
    await source.keeps()
    transport = await source.offers(mixed.tiny(2), bucket_bytes=1 << 16)
    source.kill()
    with pytest.raises(PlaneError, match="source_gone"):
        await client.run("update_weights", nixl.update_of(transport, "never"))
    await proven(http, mixed, "nixl 2", mixed.base(2))
    late = mixed.plane.spawn(ready=False, engine="hf", model=mixed.first)  # takes what one of the others keeps
    await asyncio.to_thread(late.wait_ready, START_S)
    await mixed.plane.until(lambda: all_serve(client, "nixl 2"), HEAL_S)
    await proven(http, replace(mixed, ids={"late": late.instance_id}), "nixl 2", mixed.base(2))
    late.kill()
    await mixed.witnessed(client)


async def test_what_is_broadcast_while_they_generate(
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


async def test_an_engine_that_loses_a_process_ends_its_worker(mixed: Mixed, client: RlClient) -> None:
    """The last one: it leaves `hf` alone. What comes back: tests/test_engine_kills.py."""
    families = []
    for engine, name in (("vllm", "VLLM::EngineCore"), ("sglang", "sglang::detokenizer")):
        (worker,) = (one for one in mixed.plane.spawned if one.instance_id == mixed.ids[engine])
        family = psutil.Process(worker.process.pid).children(recursive=True)
        families += family
        next(one for one in family if one.name().startswith(name)).kill()
        assert await asyncio.to_thread(worker.process.wait, END_S) == ENGINE_DEAD
    await mixed.plane.until(lambda: not any(one.is_running() for one in families))
    assert {state["engine"] for state in (await states(client)).values()} == {"hf"}
