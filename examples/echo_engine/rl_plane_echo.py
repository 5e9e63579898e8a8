"""An engine of your own, small enough to read before you write another: it echoes the prompt, shifted by its weights.

It holds the bytes of any safetensors model. Token n of a completion is token n of the prompt plus byte n of the
weights' hash, both repeated: other weights make other tokens. A token is one byte of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import closing

from blake3 import blake3

from rl_plane._util.tasks import Cancelled
from rl_plane.errors import EngineFailed, InvalidRequest
from rl_plane.protocol.generation import GenerateDelta, GenerateRequest
from rl_plane.protocol.versions import TensorSpec, WeightVersion
from rl_plane.weights.checkpoint import open_checkpoint
from worker.engines.base import EngineAdapter, EngineInfo, EngineOptions, PauseMode
from worker.engines.common.request_gate import RequestGate
from worker.engines.common.spans import Label, SpanLog
from worker.engines.common.token_checks import check_adapter, check_tokens, refuse_lacking
from worker.receive.weight_holder import TensorStream, WeightHolder
from worker.receive.weight_receiver import Receiver, load_transports

VOCAB_SIZE, MAX_MODEL_LEN = 256, 4096
FIELDS = (
    "min_tokens logit_bias allowed_token_ids bad_words_token_ids stop top_logprobs prompt_logprobs routed_experts "
    "structured_output"
)
LACKS = {f"generate:{field}": "an echo does not choose its tokens" for field in FIELDS.split()}


class EchoWeights(WeightHolder):
    """The tensors that the engine serves. A `Receiver` stages new ones, or overwrites these."""

    def __init__(self, options: EngineOptions) -> None:
        with closing(open_checkpoint(options.model, field="model")) as checkpoint:
            self.specs = dict(checkpoint.specs)
            self.load({name: bytes(tensor.data) for name, tensor in checkpoint.tensors()}, None)

    def load(self, tensors: dict[str, bytes], version: WeightVersion | None) -> None:
        self.tensors, self.version = tensors, version
        self.shifts = blake3(b"".join(data for _, data in sorted(tensors.items()))).digest()

    def token(self, prompt: list[int], number: int) -> int:
        return (prompt[number % len(prompt)] + self.shifts[number % len(self.shifts)]) % VOCAB_SIZE

    def weight_spec(self) -> Mapping[str, TensorSpec]:
        return self.specs

    def stage(self, tensors: TensorStream, cancelled: Cancelled) -> dict[str, bytes]:
        staged = {}
        for name, tensor in tensors:
            if cancelled():
                raise EngineFailed("the receive was cancelled")
            staged[name] = bytes(tensor.data)
        return staged

    def overwrite(self, tensors: TensorStream, cancelled: Cancelled) -> None:
        self.version = None  # if this fails, the weights are of no version
        self.load(self.stage(tensors, cancelled), None)


class EchoEngine(EngineAdapter):
    def __init__(self, options: EngineOptions) -> None:
        for key in options.extra:
            raise InvalidRequest(f"unknown argument {key}", field=f"engine_arg.{key}", fix="leave it out")
        options.refuse_modes("the echo engine does not have this", "leave it out")
        self._options = options
        self._gate = RequestGate()
        self._runs = False

    async def start(self) -> EngineInfo:
        self._weights = await asyncio.to_thread(EchoWeights, self._options)
        self.receiver: Receiver = Receiver(self._weights, load_transports(self._options.places))
        self._runs = True
        return EngineInfo(
            engine="echo", engine_version="0.1.0", model=self._options.model.resolve().name,
            dtype="bytes", device="cpu", world_size=1, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN,
            lacks=LACKS, transports=self.receiver.backends,
        )  # fmt: skip

    async def close(self) -> None:
        self._runs = False
        self._gate.abort(None, "error")

    async def liveness(self) -> None:
        if not self._runs:
            raise EngineFailed("the engine is not running")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        await self.liveness()
        prompt = request.prompt_token_ids or list((request.prompt or "").encode("latin-1", "replace"))
        check_tokens(request, prompt, frozenset(), VOCAB_SIZE, MAX_MODEL_LEN)
        refuse_lacking(request, LACKS)
        check_adapter(request.adapter, (), "model")
        one, spans, made = self._gate.enter(request), SpanLog(), 0
        try:
            while one.ended is None:
                await self._gate.turn(one)
                new = []
                if one.ended is None:
                    # Nothing waits from here to the yield: token and label are of the same weights.
                    new = [self._weights.token(prompt, made)]
                    spans.add(Label(self._weights.version))
                    if made + 1 == request.max_tokens or new[0] in request.stop_token_ids:
                        one.ended = "stop" if new[0] in request.stop_token_ids else "length"
                yield GenerateDelta(
                    token_ids=new,
                    logprobs=[0.0] * len(new) if request.logprobs else None,
                    text=bytes(new).decode("latin-1"),
                    finish_reason=one.ended,
                    spans=spans.tell(one.ended is not None),
                    prompt_token_ids=None if made else prompt,
                )
                made += 1
        finally:
            self._gate.leave(one)

    async def abort(self, request_ids: list[str] | None) -> int:
        return self._gate.abort(request_ids)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> bool:
        await self._gate.pause(mode)
        return clear_cache

    async def resume(self) -> None:
        self._gate.resume()

    async def flush_cache(self) -> bool:
        return True  # there is nothing to drop

    def load(self) -> tuple[int, int]:
        return self._gate.load()

    async def swap(self, staging: str, version: WeightVersion, *, keep_kv: bool = False) -> bool:
        staged = self.receiver.take(staging)
        if not self._gate.is_paused:
            raise EngineFailed("a swap needs a paused engine")
        self._weights.load(staged, version)
        return True

    def set_version(self, version: WeightVersion) -> None:
        self._weights.version = version


build = EchoEngine
