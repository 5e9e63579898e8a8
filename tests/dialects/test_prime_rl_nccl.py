"""prime-rl's own NCCL broadcast: a fleet of real models, vLLM's rendezvous, and a stand-in for NCCL over gloo. The
trainer is a reproduction of prime-rl's sender, byte for byte."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from rl_plane.errors import EngineFailed
from tests.support.broadcast_trainer import HOST
from tests.support.dialect_facade import facade, fine, proven, refused, served
from tests.support.free_port import free_port
from tests.support.hf_fleet import Witnesses
from tests.support.nccl_over_gloo import WORKER_PATCH
from tests.support.prime_rl_calls import PrimeRl
from tests.support.prime_rl_trainer import PrimeRlTrainer

if TYPE_CHECKING:
    from tests.conftest import Plane
    from tests.support.commanded_process import CommandedProcess

pytestmark = [pytest.mark.engines("vllm"), pytest.mark.timeout(400)]

TIMEOUT_S = 60

DAMAGED = """
from pathlib import Path
from rl_plane.protocol.versions import HostTensor
from rl_plane.transports.group.described_delivery import DescribedDelivery
tensors = DescribedDelivery.tensors
def damaged(self, cancelled):
    for number, (name, tensor) in enumerate(tensors(self, cancelled)):
        if number == 3 and Path({flag!r}).exists():
            data = bytearray(tensor.data)
            data[0] ^= 1
            tensor = HostTensor(tensor.spec, memoryview(data))
        yield name, tensor
DescribedDelivery.tensors = damaged
"""
"""A worker that receives one wrong bit while the file `flag` exists."""


class Trainer:
    """A trainer's process, and the calls of its orchestrator."""

    def __init__(self, process: CommandedProcess, http: httpx.AsyncClient, tmp: Path) -> None:
        self._process = process
        self._http = http
        self._tmp = tmp

    def init(self, port: int, **changed: Any) -> dict[str, Any]:
        """The body of `/init_broadcaster`, as `init_nccl_broadcast` posts it."""
        return {
            "host": HOST,
            "port": port,
            "rank_offset": 0,
            "inference_world_size": 2,
            "timeout": TIMEOUT_S,
            "quantize_in_weight_transfer": False,
            **changed,
        }

    async def form(self, base: str = "", late_s: float = 0.0) -> None:
        port = free_port()
        joining = asyncio.create_task(self._http.post(f"{base}/init_broadcaster", json=self.init(port)))
        if late_s:
            done, _ = await asyncio.wait([joining], timeout=late_s)
            assert not done, "the call waits for a trainer that still loads its model"
        await self._process.do("form", {"port": port, "world_size": 3, "timeout_s": TIMEOUT_S})
        assert fine(await joining) == {"status": "ok"}

    async def update(self, step: int, checkpoint: Path, base: str = "", **how: Any) -> httpx.Response:
        """One update in the order of `update_weights`. The trainer sends as soon as it sees NCCL_READY."""
        directory = self._tmp / "broadcasts" / f"step_{step}"
        directory.mkdir(parents=True, exist_ok=True)
        prime = PrimeRl(self._http, base)
        await prime.admin("/pause", params={"mode": "keep", "clear_cache": "false"})
        (directory / "NCCL_READY").touch()
        sending = asyncio.create_task(self._process.do("send", {"directory": str(checkpoint), **how}))
        try:
            body = {"weight_dir": directory.as_posix()}
            reply = await self._http.post(f"{base}/update_weights", json=body)
        finally:
            await prime.admin("/resume")
            if how.keys() - {"dtype", "without"}:
                with contextlib.suppress(AssertionError, EngineFailed):  # it is dead, or its group is broken
                    await sending
            else:
                await sending
        return reply


@pytest.fixture
def processes(plane: Plane) -> Iterator[list[CommandedProcess]]:
    started: list[CommandedProcess] = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            started.append(stack.enter_context(PrimeRlTrainer(plane)))
        yield started


@asynccontextmanager
async def fleet(plane: Plane, flag: Path) -> AsyncIterator[tuple[Witnesses, list[str], httpx.AsyncClient]]:
    witnesses = Witnesses(plane)
    patches = [WORKER_PATCH, WORKER_PATCH + "\n" + DAMAGED.format(flag=str(flag))]
    started = [plane.spawn(ready=False, engine="hf", model=witnesses.first, patch=one) for one in patches]
    ids = [(await asyncio.to_thread(one.wait_ready, 120.0)).instance_id for one in started]
    async with facade(plane) as http:
        yield witnesses, ids, http


async def test_prime_rls_nccl_broadcast_updates_a_fleet(plane: Plane, processes: list[CommandedProcess]) -> None:
    flag = plane.tmp / "damage"
    async with fleet(plane, flag) as (witnesses, ids, http):
        trainer = Trainer(processes[0], http, plane.tmp)
        for wrong, field in (
            ({"inference_world_size": 3}, "world_size"),
            ({"quantize_in_weight_transfer": True}, "quantize_in_weight_transfer"),
            ({"session_id": "default"}, "session_id"),
        ):
            error = refused(await http.post("/init_broadcaster", json=trainer.init(free_port(), **wrong)), 400)
            assert error["field"] == field
        await trainer.form(late_s=1.5)
        for step, seed, base in ((1, 2, ""), (2, 3, "/v1/rl")):
            assert fine(await trainer.update(step, witnesses.base(seed), base))["weight_version"] == str(step)
            await proven(http, ids, seed, str(step))
        # Its client repeats a call whose answer was lost. The trainer does not send again.
        again = {"weight_dir": (plane.tmp / "broadcasts" / "step_2").as_posix()}
        assert fine(await http.post("/update_weights", json=again))["version"]["sequence"] == 2
        described: dict[str, Any] = {"weight_dir": None, "update_info": {"names": []}}
        assert refused(await http.post("/update_weights", json=described), 400)["field"] == "update_info"
        # Another float dtype is cast, as by the engine's own server.
        fine(await trainer.update(3, witnesses.base(2), dtype="float64"))
        await proven(http, ids, 2, "3")
        # Everything has come, but a tensor is missing: the update fails, and the group stays in step.
        missing = await trainer.update(4, witnesses.base(3), without="model.norm.weight")
        assert "1 missing ('model.norm.weight')" in refused(missing, 400)["message"]
        await proven(http, ids, 2, "3")
        # The ranks differ: no worker serves what one of them received.
        await trainer.form()
        flag.touch()
        differs = refused(await trainer.update(5, witnesses.base(3)), 409)
        assert "received different bytes" in differs["message"]
        flag.unlink()
        await proven(http, ids, 2, "3")
        await trainer.form()
        fine(await trainer.update(6, witnesses.base(3)))
        await proven(http, ids, 3)


OWNED = Path(tempfile.gettempdir(), "rl_plane_owned")
"""The file that an attack makes if it is run."""


class _Attack:
    def __reduce__(self) -> Any:
        return exec, (f"open({str(OWNED)!r}, 'w')",)


async def test_a_hostile_description_or_a_dead_trainer_changes_nothing(
    plane: Plane, processes: list[CommandedProcess]
) -> None:
    import torch

    async with fleet(plane, plane.tmp / "never") as (witnesses, ids, http):
        trainer = Trainer(processes[0], http, plane.tmp)
        other = {torch.float32: [("model.norm.weight", torch.Size([3]), 3)]}
        for number, (sent, words) in enumerate(((_Attack(), "'builtins' 'exec'"), (other, "of another shape"))):
            await trainer.form()
            encoded = base64.b64encode(pickle.dumps(sent)).decode()
            reply = await trainer.update(number, witnesses.base(2), description=encoded)
            assert words in refused(reply, 400)["message"]
            assert not await asyncio.to_thread(OWNED.exists)
            await proven(http, ids, 1, "initial")
        # The broken group is forgotten: a directory is one again.
        error = refused(await http.post("/update_weights", json={"weight_dir": "/any"}), 400)
        assert error["field"] == "transport.path"
        await trainer.form()
        refused(await trainer.update(8, witnesses.base(2), broadcasts=6), 409)
        await proven(http, ids, 1, "initial")
        assert await served(http) == [(True, "initial")] * 2
        trainer = Trainer(processes[1], http, plane.tmp)
        await trainer.form()
        fine(await trainer.update(9, witnesses.base(2)))
        await proven(http, ids, 2)
