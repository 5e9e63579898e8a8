"""prime-rl's broadcaster over a torch group, at the root and beneath `/v1/rl`: the call of each step is an update of
real models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from tests.dialect_facade import facade, fine, proven, refused
from tests.fed_trainer import HOST, FedTrainer, parts_of
from tests.test_fed_updates import NUMBERS, free_port
from tests.test_hf_fleet import Witnesses

if TYPE_CHECKING:
    from tests.conftest import Plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GLOO_S = 20.0


async def test_each_step_is_one_call(plane: Plane) -> None:
    witnesses = Witnesses(plane)
    ids = await asyncio.to_thread(witnesses.spawn, 2)
    group, port = f"prime-rl {next(NUMBERS)}", free_port()
    with FedTrainer(plane) as trainer:
        async with facade(plane) as http:
            init = {
                "host": HOST,
                "port": port,
                "rank_offset": 0,
                "inference_world_size": 2,
                "timeout": GLOO_S,
                "quantize_in_weight_transfer": False,
                "backend": "gloo",
                "group_name": group,
            }
            formed, _ = await asyncio.gather(
                http.post("/v1/rl/init_broadcaster", json=init),
                trainer.do("form", {"group": group, "port": port, "world_size": 3, "timeout_s": GLOO_S}),
            )
            assert fine(formed) == {"status": "ok"}
            for step, seed, base in ((1, 2, "/v1/rl"), (2, 3, "")):
                (part,) = parts_of(witnesses.base(seed), 1)
                body: dict[str, Any] = {
                    "weight_dir": None,
                    "weight_version": f"step_{step}",
                    "update_info": {
                        "names": part["names"],
                        "dtype_names": part["dtypes"],
                        "shapes": part["shapes"],
                    },
                }
                await http.post(f"{base}/pause?mode=keep&clear_cache=false")
                sending = {"group": group, "directory": str(witnesses.base(seed)), "part": part}
                reply: httpx.Response
                reply, _ = await asyncio.gather(
                    http.post(f"{base}/update_weights", json=body), trainer.do("send", sending)
                )
                assert fine(reply)["weight_version"] == f"step_{step}"
                await http.post(f"{base}/resume")
                await proven(http, ids, seed, f"step_{step}")
            # Its own server takes a broadcast without a word of what comes: here that is asked for.
            error = refused(await http.post("/update_weights", json={"weight_dir": "/any/step_3"}), 400)
            assert error["field"] == "update_info"
            await proven(http, ids, 3, "step_2")
