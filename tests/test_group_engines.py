"""A trainer's broadcast into every rank of vLLM and SGLang, while they generate."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.faults import Stream
from tests.group_trainer import Trainer
from tests.pulls import taken_by_pulls
from tests.test_frontend_generation import frontend
from tests.test_group_transport import LORA, Pushing
from tests.test_mixed_fleet import ARGUMENTS, ENDLESS, HEAL_S, PROMPT, START_S, Mixed, proven
from worker.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane

TP_2 = {"vllm": {"tensor_parallel_size": 2}, "sglang": {"tp_size": 2}}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        pytest.param("vllm", 1, marks=pytest.mark.engines("vllm")),
        pytest.param("sglang", 1, marks=pytest.mark.engines("sglang")),
        pytest.param("vllm", 2, marks=pytest.mark.engines("vllm")),
        pytest.param("sglang", 2, marks=pytest.mark.engines("sglang")),
    ],
)
async def test_every_rank_receives_what_is_pushed(
    plane: Plane, engine: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ranks == 2:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            pytest.skip("two ranks need two cores")
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    client = await plane.client()
    first = make_witness_model(plane.tmp / "weights" / "witness1", 1, "bfloat16")
    arguments: dict[str, Any] = {**ARGUMENTS[engine], **(TP_2[engine] if ranks == 2 else {})}
    worker = plane.spawn(ready=False, engine=engine, model=first, **arguments)
    await asyncio.to_thread(worker.wait_ready, START_S)
    mixed = Mixed(plane, first, {engine: worker.instance_id})
    for seed in (2, 3):  # now: it would hold up this loop, and with it the stream
        mixed.base(seed)
    with Trainer(plane) as trainer:
        pushing = Pushing(client, trainer)
        stream = Stream(client, worker.instance_id, PROMPT, ENDLESS[engine], temperature=0.0)
        await stream.more()
        await pushing.prepare(mixed.base(2), "two")
        await stream.more()  # armed, it generates on
        await trainer.do("send", 2)
        await stream.more()
        await trainer.do("send")
        await trainer.do("finish")
        await trainer.do("close")
        await stream.more()
        await client.run("complete_weights_update")
        stream.stop()
        async with frontend(plane, admission_wait_s=HEAL_S) as http:
            await proven(http, mixed, "two", mixed.base(2))
            await pushing.push(mixed.adapter(1), "style one", **{"target": {**LORA["target"], "name": "style"}})
            await proven(http, mixed, "two", mixed.base(2), ("style", mixed.adapter(1)))
            # Killed in the middle: the engine lives, and the next trainer's update comes.
            await pushing.prepare(mixed.base(3), "three")
            await trainer.do("send", 1)
            trainer.kill()
            with pytest.raises(Exception, match="broke"):
                await client.run("complete_weights_update")
            await proven(http, mixed, "two", mixed.base(2))
            with Trainer(plane) as again:
                await Pushing(client, again).push(mixed.base(3), "three")
            await proven(http, mixed, "three", mixed.base(3), ("style", mixed.adapter(1)))
            if ranks == 2:  # while such an engine is there
                await taken_by_pulls(http, client, mixed)
