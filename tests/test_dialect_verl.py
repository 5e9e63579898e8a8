"""verl's own client of SGLang, from its public package and unchanged, against a fleet of real models."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from rl_plane.process import die_with_parent
from tests.dialect_facade import facade, proven, witnessed
from tests.test_hf_fleet import Witnesses
from tests.verl_client import MODULE

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines("sglang"),
    pytest.mark.skipif(not MODULE.exists(), reason="verl's client is not there: make engines"),
    pytest.mark.timeout(400),
]

ENDS_S = 240.0
"""It imports SGLang, on two cores, among other tests."""


async def test_verls_client_brings_weights_and_adapters(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    seeds = (2, 3, 1)
    async with facade(plane) as http:
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.verl_client",
            str(http.base_url),
            str(witnesses.first),
            str(witnesses.adapter(1)),
            *(str(witnesses.base(seed)) for seed in seeds),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            preexec_fn=die_with_parent(),
        )
        try:
            async with asyncio.timeout(ENDS_S):
                told, _ = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
        assert client.returncode == 0
        lines = [json.loads(line) for line in told.decode().splitlines() if line.startswith(("[", '"'))]
        pickled, *made, names = lines
        assert "501" in pickled
        assert made == [witnessed(seed) for seed in seeds]
        assert "verl" in names
        await proven(http, ids, seeds[-1])
