"""Models, requests and plain forwards for tests of the `hf` engine."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_plane.protocol.generation import GenerateDelta, GenerateRequest, VersionSpan
from rl_plane.protocol.versions import HostTensor, TensorSpec, WeightVersion
from worker.receive.weight_holder import TensorStream
from worker.testing.tiny_model import VOCAB_SIZE, make_tiny_model, make_witness_model, witness_next_token

if TYPE_CHECKING:
    from worker.engines.hf.adapter import HfEngine

BOUND_S = 60.0
"""More than anything here takes on a busy machine."""


@dataclasses.dataclass
class Models:
    tiny: Path
    witness: dict[int, Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("hf-models")
    return Models(
        make_tiny_model(root / "tiny", seed=1),
        {seed: make_witness_model(root / f"witness-{seed}", seed) for seed in (1, 2)},
    )


@pytest.fixture(scope="session")
def plain(models: Models) -> Any:
    """A plain transformers module with the same weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(models.tiny, dtype="auto", local_files_only=True).eval()


@dataclasses.dataclass
class Result:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    finish: str | None = None
    spans: list[VersionSpan] = dataclasses.field(default_factory=list)
    prompt: list[int] | None = None
    deltas: list[GenerateDelta] = dataclasses.field(default_factory=list)


class Run:
    """A request under way, and a way to wait until it has so many tokens."""

    def __init__(self, engine: HfEngine, request: GenerateRequest) -> None:
        self.result = Result()
        self._grown = asyncio.Condition()
        self._task = asyncio.create_task(self._consume(engine, request))

    async def _consume(self, engine: HfEngine, request: GenerateRequest) -> Result:
        result = self.result
        try:
            async for delta in engine.generate(request):
                result.tokens += delta.token_ids
                result.logprobs += delta.logprobs or []
                result.text += delta.text
                result.finish = delta.finish_reason
                result.deltas.append(delta)
                if delta.prompt_token_ids is not None:
                    assert result.prompt is None
                    result.prompt = delta.prompt_token_ids
                if delta.finish_reason:
                    result.spans = delta.spans
                async with self._grown:
                    self._grown.notify_all()
        finally:
            async with self._grown:
                self._grown.notify_all()
        return result

    async def reach(self, tokens: int) -> None:
        async with asyncio.timeout(BOUND_S), self._grown:
            await self._grown.wait_for(lambda: len(self.result.tokens) >= tokens or self._task.done())
        assert len(self.result.tokens) >= tokens

    async def end(self) -> Result:
        async with asyncio.timeout(BOUND_S):
            return await self._task

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=BOUND_S)


numbers = iter(range(1_000_000))


def ask(ids: list[int] | None = None, /, **fields: Any) -> GenerateRequest:
    fields = {"id": f"r{next(numbers)}", "max_tokens": 16, "temperature": 0.0, "ignore_eos": True} | fields
    return GenerateRequest(prompt_token_ids=ids, **fields)


async def run(engine: HfEngine, request: GenerateRequest) -> Result:
    return await Run(engine, request).end()


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed} {length}").randrange(3, VOCAB_SIZE) for _ in range(length)]


def plain_logprobs(plain: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    with torch.no_grad():
        rows = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    picked: list[float] = rows.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()
    return picked


def assert_greedy(plain: Any, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the most likely one, or ties with it."""
    with torch.no_grad():
        rows = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    for row, token in zip(rows, tokens, strict=True):
        assert float(row.max() - row[token]) < 1e-4


def version(sequence: int) -> WeightVersion:
    return WeightVersion("run", sequence, f"step_{sequence}", f"blake3:{sequence:064d}")


NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def checkpoint(path: Path, dtype: Any = None) -> Iterator[tuple[str, HostTensor]]:
    """Yields a checkpoint's tensors as a transport delivers them: read-only memory, in any order."""
    from safetensors.torch import load_file

    for name, tensor in sorted(load_file(path / "model.safetensors").items(), reverse=True):
        tensor = tensor.to(dtype or tensor.dtype).contiguous()
        raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).toreadonly()
        yield name, HostTensor(TensorSpec(NAMES[tensor.dtype], tuple(tensor.shape)), raw)


NAMES_OF_STAGINGS = (f"staging-{number}" for number in itertools.count())


def hold(engine: HfEngine, tensors: TensorStream) -> str:
    """Puts tensors into staging without a transport."""
    name = next(NAMES_OF_STAGINGS)
    engine.receiver._staged[name] = engine.holder.stage(tensors, lambda: False)
    return name


async def stage(engine: HfEngine, path: Path, dtype: Any = None) -> str:
    return await asyncio.to_thread(hold, engine, checkpoint(path, dtype))


def witnessed(seed: int, token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = witness_next_token(seed, token)
        tokens.append(token)
    return tokens


def plain_prompt_logprobs(plain: Any, prompt: list[int]) -> list[float]:
    """The logprobs of all tokens but the first."""
    return plain_logprobs(plain, prompt[:1], prompt[1:])


def given_prompt_logprobs(result: Result) -> list[float]:
    """On the first delta only."""
    assert all(delta.prompt_logprobs is None for delta in result.deltas[1:])
    first, *rest = result.deltas[0].prompt_logprobs or []
    assert first is None
    return [value for value in rest if value is not None]


def freeze_after(engine: HfEngine, steps: int) -> asyncio.Event:
    """Pauses the engine after this number of steps. The event is set then."""
    loop, frozen, events = engine.loop, asyncio.Event(), asyncio.get_running_loop()
    step, left = loop._step, steps

    def counted(batch_processor: Any, adapter: str | None) -> bool:
        nonlocal left
        ran = step(batch_processor, adapter)
        left -= ran
        if ran and left == 0:
            loop.freeze()
            events.call_soon_threadsafe(frozen.set)
        return ran

    loop._step = counted  # type: ignore[method-assign]
    return frozen
