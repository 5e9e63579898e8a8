"""A trainer in float32 and an engine in bfloat16: the tokens show the result of each source, and of a killed
trainer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_plane.publish import AdapterSource, ExportSource, ModuleSource, WeightPublisher
from tests.support.frontend_process import frontend
from tests.support.hf_fleet import proven
from tests.support.loaded_models import load
from tests.support.paths import ROOT
from worker.testing.tiny_adapter import make_witness_adapter
from worker.testing.tiny_model import make_witness_model

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = pytest.mark.slow

START_S = 150.0
CHILD_S = 100.0

_TRAINER = """
import sys, torch
from transformers import AutoModelForCausalLM
from rl_plane.publish import ExportSource, WeightPublisher
path, url, namespace, root = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
def export():
    for number, pair in enumerate(model.named_parameters()):
        if publishing and number == 5:
            print("sending", flush=True)
            sys.stdin.read()
        yield pair
publishing = False
source = ExportSource(export, dtype=torch.bfloat16)
source.take()
publishing = True
WeightPublisher(source, url, namespace=namespace, root=root, bucket_bytes=4096).publish("killed")
"""


def train(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _TRAINER, *arguments],
        cwd=ROOT,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(400)
async def test_every_source_reaches_the_engine(plane: Plane) -> None:
    first = make_witness_model(plane.tmp / "weights" / "first", 1, "bfloat16")
    spawned = plane.spawn(ready=False, engine="hf", model=first)
    ids = [(await asyncio.to_thread(spawned.wait_ready, START_S)).instance_id]
    models = {seed: load(make_witness_model(plane.tmp / f"trained{seed}", seed)) for seed in (2, 3)}
    root = plane.tmp / "weights" / "published"
    fleet = await plane.fleet()
    async with frontend(plane) as http:
        await proven(http, ids, 1)
        source = ModuleSource(models[2], dtype=torch.bfloat16)
        await WeightPublisher(source, fleet, root=root).publish_async("module")
        await proven(http, ids, 2)

        # A trainer that is killed while it sends.
        arguments = [str(plane.tmp / "trained3"), plane.url, plane.namespace, str(root)]
        trainer = train(arguments)
        assert trainer.stdout is not None
        said = await asyncio.wait_for(asyncio.to_thread(trainer.stdout.readline), CHILD_S)
        assert said == "sending\n"
        assert [path.name for path in root.iterdir() if path.name.startswith(".")]
        trainer.kill()
        await asyncio.to_thread(trainer.communicate)
        await proven(http, ids, 2)

        def export() -> Iterator[tuple[str, Any]]:
            yield from models[3].state_dict().items()  # as a Megatron bridge gives HF's names

        publisher = WeightPublisher(ExportSource(export, dtype=torch.bfloat16), fleet, root=root)
        await publisher.publish_async("export")
        await proven(http, ids, 3)
        assert not [path.name for path in root.iterdir() if path.name.startswith(".")]

        # An adapter as PEFT trains it, on the base that is served.
        from peft import PeftModel

        adapter = make_witness_adapter(plane.tmp / "trained3", plane.tmp / "adapter", 1)
        trained = AdapterSource(PeftModel.from_pretrained(models[3], str(adapter)), dtype=torch.bfloat16)
        await WeightPublisher(trained, fleet, adapter="a", root=root).publish_async("adapter")
        await proven(http, ids, 3, a=1)
