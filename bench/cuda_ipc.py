"""`python -m bench.cuda_ipc [--gb 4]`: weights of a trainer's GPU into an `hf` engine in another process, by CUDA IPC.

It needs a GPU, and has not been run on one yet. Each model is received, checked and staged, swapped in, and shown to be
there by the tokens that it makes. Beside it stand reads of the trainer's buffer by the engine's process into memory of
its own on the GPU, a copy of as many bytes within the GPU, and one from it to the host, where weights are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch

from bench.engine_cycle import LAYER, LAYER_BYTES, SEEDS, SMALL, Reader, copy_s
from bench.staged import stage
from rl_plane._util.processes import die_with_parent
from rl_plane.protocol.versions import WeightVersion
from rl_plane.publish.sources.source_choice import as_source
from rl_plane.transports.ipc.cuda_buffers import GpuBuffers, Handle, OpenBuckets
from rl_plane.transports.ipc.sender import IpcSender
from rl_plane.transports.ipc.torch_cuda import TORCH_CUDA
from rl_plane.transports.packing import fill
from rl_plane.weights.checkpoint import open_checkpoint
from rl_plane.weights.manifest import Manifest, pack
from worker.engines.base import EngineOptions
from worker.engines.common.torch_weights import DTYPE_OF_NAME
from worker.engines.hf.adapter import build
from worker.testing.tiny_model import make_witness_model

DEVICE = "cuda:0"
TOKENS = 8


# ---- the trainer ----


def measure(models: dict[int, Path], rounds: int, bucket_bytes: int) -> dict[str, Any]:
    sender = IpcSender(lambda: 1, on_gpus=lambda: True)
    sender.device = DEVICE
    times: dict[str, list[float]] = {"sent_s": [], "swap_s": []}
    with _engine(models[SEEDS[0]]) as engine:
        _answer(engine)  # it has started
        for number in range(rounds):
            seed = SEEDS[(number + 1) % 2]
            taken = as_source(_on_gpu(models[seed])).take()
            manifest = Manifest(pack(taken.specs, bucket_bytes))
            digests: dict[str, str] = {}
            start = time.perf_counter()
            _ask(engine, transport=sender.open(manifest), label=str(seed))
            for bucket in fill(manifest, taken.tensors, sender.buffer, digests):
                sender.send(bucket)
            sender.finish(digests)
            times["sent_s"].append(time.perf_counter() - start)
            sender.close()
            answer = _answer(engine)
            if answer["digest"] != manifest.digested(digests).digest:
                raise SystemExit(f"the engine has {answer['digest']}")
            times["swap_s"].append(answer["swap_s"])
        buffers = GpuBuffers(manifest, bucket_bytes, DEVICE, TORCH_CUDA)
        handles = buffers.shared(_uuid())
        _ask(engine, handles=msgpack.packb([one.to_wire() for one in handles]).hex(), nbytes=bucket_bytes)
        read_s = _answer(engine)["read_s"]
        buffers.close()
    nbytes = manifest.nbytes
    here = torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    on_device = copy_s(torch.empty_like(here), here, torch.cuda.synchronize)
    to_host = copy_s(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), here, torch.cuda.synchronize)
    sent = statistics.median(times["sent_s"])
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "gb": round(nbytes / 1e9, 3),
        "sent_s": round(sent, 4),
        "sent_gb_s": round(nbytes / sent / 1e9, 2),
        "swap_ms": round(statistics.median(times["swap_s"]) * 1e3, 3),
        "ipc_read_gb_s": round(bucket_bytes / read_s / 1e9, 1),
        "device_copy_gb_s": round(nbytes / on_device / 1e9, 1),
        "host_copy_gb_s": round(nbytes / to_host / 1e9, 1),
    }


def _on_gpu(model: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(model, field="model")
    try:
        return {
            name: torch.frombuffer(bytearray(tensor.data), dtype=DTYPE_OF_NAME[tensor.spec.dtype])
            .reshape(tensor.spec.shape)
            .to(DEVICE)
            for name, tensor in checkpoint.tensors()
        }
    finally:
        checkpoint.close()


def _engine(model: Path) -> subprocess.Popen[str]:
    """Ends with its input."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.cuda_ipc", "--engine", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )


def _ask(engine: subprocess.Popen[str], **what: Any) -> None:
    assert engine.stdin is not None
    print(json.dumps(what), file=engine.stdin, flush=True)


def _answer(engine: subprocess.Popen[str]) -> dict[str, Any]:
    assert engine.stdout is not None
    line = engine.stdout.readline()
    if not line:
        raise SystemExit("the engine's process failed")
    answer: dict[str, Any] = json.loads(line)
    return answer


# ---- the engine ----


async def serve(model: Path) -> None:
    engine = build(EngineOptions(model, device=DEVICE))
    info = await engine.start()
    print(json.dumps({"engine": info.engine}), flush=True)
    try:
        for number, line in enumerate(sys.stdin):
            asked = json.loads(line)
            if "handles" in asked:
                print(
                    json.dumps(
                        {"read_s": _read_s(msgpack.unpackb(bytes.fromhex(asked["handles"])), asked["nbytes"])}
                    )
                )
                sys.stdout.flush()
                continue
            staging = f"staging-{number}"
            reply = await stage(engine, staging, asked["transport"])
            start = time.perf_counter()
            await engine.pause("keep", False)
            await engine.swap(staging, WeightVersion("bench", number + 1, asked["label"], reply["digest"]))
            await engine.resume()
            swap_s = time.perf_counter() - start
            await Reader(engine).read(min(TOKENS, info.max_model_len - 1))  # each token is compared
            print(json.dumps({"digest": reply["digest"], "swap_s": swap_s}), flush=True)
    finally:
        await engine.close()


def _read_s(wire: list[Any], nbytes: int) -> float:
    opened = OpenBuckets([Handle.from_wire(one, nbytes) for one in wire], _uuid(), TORCH_CUDA)
    read_s = copy_s(torch.empty_like(opened.buffers[0]), opened.buffers[0], torch.cuda.synchronize)
    opened.close()
    return read_s


def _uuid() -> str:
    uuid = TORCH_CUDA.uuid_of(DEVICE)
    assert uuid is not None, "there is a GPU"
    return uuid


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda_ipc", description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the model; 0: a tiny one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("CUDA IPC needs a GPU, and torch sees none here")
    if arguments.engine is not None:
        asyncio.run(serve(arguments.engine))
        return
    layers = round(arguments.gb * 1e9 / LAYER_BYTES)
    shape = {**LAYER, "num_hidden_layers": layers} if layers else SMALL
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            seed: make_witness_model(Path(scratch) / f"model{seed}", seed, "bfloat16", **shape) for seed in SEEDS
        }
        print(json.dumps(measure(models, arguments.rounds, arguments.bucket_mb << 20), indent=2))


if __name__ == "__main__":
    main()
