"""Tensors that a trainer shares by SGLang's own serializer, from another process, into real models. The tokens show
which weights the fleet serves."""

from __future__ import annotations

import asyncio
import base64
import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.support.dialect_facade import facade, fine, proven, refused, served
from tests.support.hf_fleet import Witnesses
from tests.support.hf_fleet import proven as adapters_proven
from tests.support.sharing_trainer import SharingTrainer

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.engines("sglang"), pytest.mark.timeout(400)]

ROUTE = "/update_weights_from_tensor"
ADAPTERS = "/load_lora_adapter_from_tensors"

WAYS = (
    ("list", None, 1),
    ("bucket", "flattened_bucket", 1),
    ("list", "direct", 2),
    ("local", None, 2),
    ("transposed", None, 1),
    ("parameters", "direct", 1),
)
"""(how the trainer pickles, `load_format`, elements)"""


async def send(
    http: httpx.AsyncClient, trainer: SharingTrainer, witnesses: Witnesses, seed: int, **how: Any
) -> httpx.Response:
    load_format, label = how.pop("load_format", None), how.pop("label", f"step {seed}")
    elements = await trainer.shared(witnesses.base(seed), **how)
    body = {
        "serialized_named_tensors": elements,
        "load_format": load_format,
        "flush_cache": False,
        "weight_version": label,
    }
    return await http.post(ROUTE, json=body)


async def test_every_form_of_shared_tensors_updates_the_fleet(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    with SharingTrainer(plane) as trainer:
        async with facade(plane) as http:
            for seed, (how, load_format, ranks) in enumerate(WAYS, 2):
                for part in (0, 1):
                    answer = fine(
                        await send(
                            http,
                            trainer,
                            witnesses,
                            seed,
                            how=how,
                            load_format=load_format,
                            ranks=ranks,
                            parts=2,
                            part=part,
                        )
                    )
                    assert ("weight_version" in answer) == (part == 1), answer
                assert answer["weight_version"] == f"step {seed}"
                await proven(http, ids, seed, f"step {seed}")
                assert await trainer.drop() == [], "the trainer's memory is free again"
            await _commits_at_an_end(http, trainer, witnesses, ids)


async def _commits_at_an_end(
    http: httpx.AsyncClient, trainer: SharingTrainer, witnesses: Witnesses, ids: list[str]
) -> None:
    """slime and miles pause, send buckets and continue. A call that comes again gets its first answer."""
    fine(await http.post("/pause_generation", json={}))
    for part in (0, 1):
        elements = await trainer.shared(witnesses.base(1), how="bucket", parts=2, part=part)
        body = {
            "serialized_named_tensors": elements,
            "load_format": "flattened_bucket",
            "weight_version": "paused",
        }
        told = fine(await http.post(ROUTE, json=body))
        assert "are staged" in told["message"]
        assert fine(await http.post(ROUTE, json=body)) == told
        await trainer.drop()  # the trainer uses its bucket's memory again as soon as the call is answered
    whole = base64.b64encode((witnesses.base(2) / "model.safetensors").read_bytes()).decode()
    other = {"serialized_named_tensors": [whole], "load_format": "safetensors"}
    assert "in another way" in refused(await http.post(ROUTE, json=other), 409)["message"]
    fine(await http.post("/continue_generation", json={}))
    await proven(http, ids, 1, "paused")


async def test_adapters_load_from_shared_tensors_also_into_late_workers(plane: Plane) -> None:
    """SGLang's own `Engine.load_lora_adapter_from_tensors` sends such elements."""
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    with SharingTrainer(plane) as trainer:
        async with facade(plane) as http:
            for seed, (how, load_format) in enumerate((("mapping", None), ("bucket", "flattened_bucket")), 1):
                path = witnesses.adapter(seed)
                sums = {name: sha256(data).hexdigest() for name, data in load_bytes(path).items()}
                body = {
                    "lora_name": "style",
                    "config_dict": json.loads((path / "adapter_config.json").read_text()),
                    "serialized_named_tensors": await trainer.shared(path, how=how, ranks=2),
                    "load_format": load_format,
                }
                wrong = {**body, "expected_checksums": sums | {next(iter(sums)): "0" * 64}}
                error = refused(await http.post(ADAPTERS, json=wrong), 400)
                assert error["field"] == "expected_checksums"
                body["serialized_named_tensors"] = await trainer.shared(path, how=how, ranks=2)
                told = fine(await http.post(ADAPTERS, json={**body, "expected_checksums": sums}))
                assert list(told["loaded_adapters"]) == ["style"]
                assert await trainer.drop() == [], "the trainer's memory is free again"
                await adapters_proven(http, ids, 1, style=seed)
            late = await asyncio.to_thread(witnesses.spawn, 1)
            await adapters_proven(http, late, 1, style=seed)
            lost = refused(await http.post(ADAPTERS, json={**body, "lora_name": "lost"}), 400)
            assert "no shared memory torch_" in lost["message"]
            gaps = {"serialized_named_tensors": await trainer.shared(path, how="transposed"), "load_format": None}
            refused(await http.post(ADAPTERS, json={**body, **gaps, "lora_name": "gaps"}), 501)
            assert "lost" not in fine(await http.get("/v1/rl/state"))["adapters"]


async def test_refused_tensors_change_nothing(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 1)
    async with facade(plane) as http:
        with SharingTrainer(plane, "file_descriptor") as trainer:
            error = refused(await send(http, trainer, witnesses, 2), 501)
            assert error["field"] == "serialized_named_tensors.0"
            assert 'set_sharing_strategy("file_system")' in error["fix"]
        with SharingTrainer(plane) as trainer:
            elements = await trainer.shared(witnesses.base(2))
            body = {"serialized_named_tensors": elements}
            assert "flattened bucket" in _told(
                await http.post(ROUTE, json={**body, "load_format": "flattened_bucket"})
            )
            own = {**body, "load_format": "my.loader"}
            assert refused(await http.post(ROUTE, json=own), 501)["field"] == "load_format"
            half = await trainer.shared(witnesses.base(2), parts=2)
            differ = {"serialized_named_tensors": [*elements, *half]}
            assert "the first has" in _told(await http.post(ROUTE, json=differ))
            # A trainer that frees its tensors before the answer.
            gone = await trainer.shared(witnesses.base(2))
            fine(await http.post(ROUTE, json={"serialized_named_tensors": gone, "weight_version": "two"}))
            await trainer.drop()
            again = {"serialized_named_tensors": gone, "weight_version": "three"}
            lost = refused(await http.post(ROUTE, json=again), 400)
            assert "no shared memory torch_" in lost["message"]
            assert "on this machine" in lost["fix"]
        await proven(http, ids, 2, "two")
        assert await served(http) == [(True, "two")]


def load_bytes(adapter: Path) -> dict[str, bytes]:
    """The bytes of each tensor of an adapter."""
    return {
        name: tensor.numpy().tobytes() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }


def _told(answer: httpx.Response) -> str:
    message: str = refused(answer, 400)["message"]
    return message
